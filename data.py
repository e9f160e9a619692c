"""Compositions, splits and images of a dataset.

    python data.py DATASET|FOLDER        # count what is there, and check it: every photo is decoded
    python data.py FOLDER --make-split   # write images.csv with a split of your own photos

A folder has one of three layouts:
* `compositional-split-natural/*_pairs.txt`, a metadata `.t7` and `images/`, as published;
* an `images.csv` with the columns image, state, object, split;
* photos in SPLIT/STATE/OBJECT/ or SPLIT/STATE_OBJECT/, where SPLIT is train, val and test.

N images, S states, O objects, P pairs, F numbers a feature; composition (s, o) has the index s*O +
o; a phase (train, val, test) is a set of images.
"""

import argparse
import csv
import io
import itertools
import re
import unicodedata
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from compcos import check_archive, check_value
from lab import shell
from lab.files import load_tensors, reading, write_rows
from lab.photos import broken_photos, list_photos, missing_photos, repeated_photos, with_reasons
from feasibility import read_pairs

PHASES = "train", "val", "test"
FOLDERS = {"utzappos": "ut-zap50k", "mitstates": "mit-states", "cgqa": "cgqa", "shapes": "shapes"}
DOWNLOADED = "utzappos", "mitstates", "cgqa"  # the keys of FOLDERS that lab.download fetches
SPLIT = "compositional-split-natural"
METADATA = f"metadata_{SPLIT}.t7"
METADATA_KEYS = "image", "attr", "obj", "set"
FEATURES = "features.npz", "resnet18_featurers.t7"  # the first that exists is used

REQUIRED = "image", "state", "object"  # columns of images.csv
# The phase of each name that a folder, or a cell in the column split, may have.
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
MAKE_SPLIT = "`python data.py FOLDER --make-split`"

COMPOSITION_SHARE = 0.2  # of the compositions, unseen in val, and as many in test: 6 and 6 of 28
IMAGE_SHARE = 0.15  # of the seen compositions' images, in val, and as many in test


class Dataset(NamedTuple):
    """The content of a dataset's folder, read by `load`."""

    name: str                       # a key of FOLDERS, or the folder's name
    folder: Path
    states: list[str]               # S names, sorted
    objects: list[str]              # O names, sorted
    pairs: dict[str, np.ndarray]    # phase -> (P, 2) int64 state and object, unique, ascending
    images: dict[str, list[str]]    # phase -> N names, `/` between folders; `path` finds the file
    targets: dict[str, np.ndarray]  # phase -> (N,) int64, s*O + o
    feasible: np.ndarray | None     # (S, O) bool, the truth where feasible_pairs.txt exists
    notes: list[str]                # oddities that are no obstacle
    upright: bool = True            # photos are turned upright by their EXIF tag

    @property
    def seen(self):
        """(S, O) bool: the training pairs, and all compositions that training images show."""
        seen = np.zeros((len(self.states), len(self.objects)), bool)
        seen[tuple(self.pairs["train"].T)] = True
        seen.flat[self.targets["train"]] = True
        return seen

    def candidates(self, phase):
        """Return the closed world of a phase, its own pairs and the seen ones: (S*O,) bool."""
        allowed = self.seen
        allowed[tuple(self.pairs[phase].T)] = True
        return allowed.ravel()

    @property
    def existing(self):
        """(S, O) bool: the compositions that can exist where that is known, else those listed."""
        if self.feasible is not None:
            return self.feasible | self.seen
        return (self.candidates("val") | self.candidates("test")).reshape(self.seen.shape)

    @property
    def compositions(self):
        """S*O texts `state object` in the order s*O + o."""
        return [f"{state} {object_}" for state in self.states for object_ in self.objects]

    @property
    def every_image(self):
        """The images of all sets, each once, in the order of PHASES."""
        return list(dict.fromkeys(itertools.chain(*self.images.values())))

    def path(self, image):
        """Return the path of an image, which is under `images/` or beside images.csv.

        The file's name may have another Unicode form than the list's, as names from a Mac have.
        """
        for name in (image, unicodedata.normalize("NFD", image)):
            for place in (self.folder / "images", self.folder):
                if (place / name).exists():
                    return place / name
        return self.folder / image


# ---- finding and reading a folder ----------------------------------------------------------------


def load(name, root="data"):
    """Read a dataset's lists, images and split.

    Rows with a pair in no list, such as NA in place of a name, are left out. Of other rows the set,
    and not the pair, says where an image belongs.

    Args:
        name: str or Path, a key of FOLDERS, a dataset's folder, or the name of a folder in `root`.
        root: str or Path, the folder that holds the datasets.

    Returns:
        Dataset.

    Raises:
        FileNotFoundError: the folder, or a file in it, does not exist.
        ValueError: something is not as expected; the message names the first such file and line.
    """
    folder = locate(name, root)
    layouts = {"images.csv": read_own, SPLIT: read_published,
               "train": read_own, "images/train": read_own}
    readers = [read for name, read in layouts.items() if (folder / name).exists()]
    if not readers:
        raise ValueError(
            f"{folder}: expected {SPLIT}/ with train_pairs.txt, val_pairs.txt, test_pairs.txt, or "
            "an images.csv (image,state,object,split), or photos in train/, val/ and test/, found "
            f"none; {MAKE_SPLIT} writes an images.csv for your own photos")
    lists, rows = readers[0](folder)

    # The primitives are the words of the lists; a composition's index follows from their order.
    listed = set().union(*lists.values())
    states = sorted({state for state, _ in listed})
    objects = sorted({object_ for _, object_ in listed})
    index = {pair: number for number, pair in enumerate(itertools.product(states, objects))}

    pairs = {}
    images = {}
    targets = {}
    for phase in PHASES:
        shown = [(image, index[pair]) for image, pair, its_phase in rows
                 if its_phase == phase and pair in listed]
        if not shown:
            raise ValueError(f"{folder}: no image of a listed pair in the set {phase!r}; train, "
                             f"val and test each need some ({MAKE_SPLIT} can cut val and test out "
                             "of the train of your own photos)")
        images[phase] = [image for image, _ in shown]
        targets[phase] = np.array([target for _, target in shown], np.int64)
        indices = np.unique([index[pair] for pair in lists[phase]])
        pairs[phase] = np.stack(np.divmod(indices, len(objects)), 1)  # (P, 2)
    feasible = read_feasible(folder, index, (len(states), len(objects)))
    full_name = name if name in FOLDERS else folder.resolve().name
    dataset = Dataset(full_name, folder, states, objects, pairs, images, targets, feasible, [],
                      upright=name not in DOWNLOADED)
    return dataset._replace(notes=dataset_notes(dataset))


def locate(name, root="data"):
    """Return the folder of a dataset: `root`/ut-zap50k for utzappos and so on (FOLDERS).

    Any other name is a folder, or else a folder of `root`. FileNotFoundError: it does not exist.
    """
    places = [Path(name), Path(root, name)]
    if name in FOLDERS:
        places = [Path(root, FOLDERS[name])]
    for folder in places:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"no dataset {str(name)!r}: no folder {shell.shorten(places)}; expected a folder, or a "
        "name whose folder `python -m lab.download NAME --data-root DIR` fetches")


def read_published(folder):
    """Read the published layout: {phase: list of (state, object)} and rows (image, pair, phase)."""
    lists = {phase: read_pairs(folder / SPLIT / f"{phase}_pairs.txt") for phase in PHASES}
    rows = []
    for image, state, object_, phase in read_metadata(folder / METADATA):
        pair = normalize_name(state), normalize_name(object_)
        rows.append((normalize_path(image), pair, phase))
    return lists, rows


def read_metadata(file, keys=METADATA_KEYS):
    """Return tuples of texts, by default (image, state, object, set), from a `.t7` list of dicts.

    No code in the file is run. ValueError: it holds something else.
    """
    expected = f"a list of dicts of texts {', '.join(keys)}, by torch.save"
    stored = load_tensors(file, expected)
    with reading(file, f"expected {expected}"):
        # `str.strip` refuses values that are no text.
        return [tuple(str.strip(row[key]) for key in keys) for row in stored]


def read_own(folder):
    """Read images.csv or photos in folders, as `read_published` does, with lists from the rows."""
    lists = {phase: [] for phase in PHASES}
    rows = []
    for row in own_rows(folder):
        phase = phase_of(row)
        if phase is None:
            raise ValueError(f"{folder}: expected a split train, val or test of {row['image']}, "
                             f"found {row.get('split', '')!r}; {MAKE_SPLIT} makes a split where "
                             "there is none")
        pair = row["state"], row["object"]
        lists[phase].append(pair)
        rows.append((normalize_path(row["image"]), pair, phase))
    return lists, rows


def own_rows(folder):
    """Return a list of {column: text}, of images.csv or else of the photos in folders."""
    file = folder / "images.csv"
    return list(read_table(file)) if file.exists() else read_photos(folder)


def phase_of(row):
    """Return the phase that a row's `split` names, None if it names none."""
    return SPLITS.get(row.get("split", "").lower())


def read_table(file):
    """Yield {column in lower case: text} of each row of a table of images.

    Columns are separated by `,`, `;` or tab. Empty rows are skipped, other columns are kept.
    ValueError names the first line that is not as expected.
    """
    with reading(file, "expected a table of image,state,object,split, saved as `CSV UTF-8`"):
        text = file.read_text(encoding="utf-8-sig")
        header = text.partition("\n")[0]
        separator = max(",;\t", key=header.count)
        # Not splitlines(): it cuts within quotes, and at more than line ends.
        lines = io.StringIO(text, newline="")
        reader = csv.reader(lines, delimiter=separator, skipinitialspace=True)
        columns = [name.strip().lower() for name in next(reader, ())]
        if [columns.count(name) for name in REQUIRED] != [1, 1, 1]:
            raise ValueError(f"{file} has the columns {header!r}: remove any line above them, such "
                             "as `sep=,`")
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if any(cells):
                row = dict(itertools.zip_longest(columns, cells, fillvalue=""))
                if len(cells) > len(columns) or "" in [row[name] for name in REQUIRED]:
                    raise ValueError(f"{file} line {reader.line_num}: found {cells}")
                row["state"] = normalize_name(row["state"])
                row["object"] = normalize_name(row["object"])
                yield row


def read_feasible(folder, index, shape):
    """Return (S, O) bool from feasible_pairs.txt (`state object` a line), None without that file.

    index: {(state, object): s*O + o} of all compositions; shape: (S, O).
    """
    file = folder / "feasible_pairs.txt"
    if not file.exists():
        return None
    feasible = np.zeros(shape, bool)
    with reading(file, "expected states and objects of the lists"):
        feasible.flat[[index[pair] for pair in read_pairs(file)]] = True
    return feasible


def dataset_notes(dataset):
    """Return notes on what training does not show, on odd names, and on repeated images."""
    notes = []
    states, objects = np.divmod(dataset.targets["train"], len(dataset.objects))  # (N,) each
    unknown = [*np.delete(dataset.states, states), *np.delete(dataset.objects, objects)]
    if unknown:
        notes.append(f"no training image shows {shell.shorten(unknown)}")
    for names in (dataset.states, dataset.objects):
        count = Counter(map(str.casefold, names))
        alike = [name for name in names if count[name.casefold()] > 1]
        if alike:
            notes.append("names that differ in case alone count as different, so spell alike what "
                         f"is the same: {shell.shorten(alike)}")
    for phase in PHASES[1:]:
        target = dataset.targets[phase]  # (N,)
        allowed = dataset.candidates(phase)[target]
        if not allowed.all():
            notes.append(f"{phase} images of pairs in neither the {phase} nor the training list: "
                         f"a ceiling of {allowed.mean():.1%} in the closed world")
        seen = dataset.seen.ravel()[target]
        if seen.all() or not seen.any():
            notes.append(f"{phase} images show {'seen' if seen.all() else 'unseen'} compositions "
                         "alone: only that half can be evaluated")

    repeated = sum(map(len, dataset.images.values())) - len(dataset.every_image)
    if repeated:
        notes.append("rows that repeat an image of their own or of another set, each of which "
                     f"counts: {repeated:,}")
    return notes


def normalize_path(image):
    """Return an image's name with `/` between folders, no `./` before, and composed letters."""
    return unicodedata.normalize("NFC", image.replace("\\", "/").removeprefix("./"))


def normalize_name(name):
    """Return a state's or object's name without blanks around it, and single blanks within."""
    return " ".join(name.split())


# ---- what features are made of -------------------------------------------------------------------


def finished_features(dataset, file=None):
    """Return the file whose features are used as they are, None if features are made of photos.

    file: the file that the user names, or "pixels", which are made of photos; None: the first of
    FEATURES in the folder. The cache of an extraction is such a file only where all photos are
    gone; otherwise the extraction updates it.
    """
    if file == "pixels":
        return None
    if file is not None:
        return Path(file)
    for name in FEATURES:
        path = dataset.folder / name
        if path.exists():
            photos = map(dataset.path, dataset.every_image)
            is_cache = "stamps.npy" in check_archive(path)
            return None if is_cache and any(map(Path.exists, photos)) else path
    return None


# ---- saved files ---------------------------------------------------------------------------------


def read_features(path):
    """Return the dict in a .npz or torch.save file: `files`, a list, `features` (N, F) float32.

    The content, not the name's ending, decides how the file is read. ValueError says what is not as
    expected.
    """
    expected = ("`files`, N names, and `features`, (N, F) numbers, as np.savez(FILE, files=names, "
                "features=array) writes them")
    if any(name.endswith(".npy") for name in check_archive(path)):
        remedy = "turn arrays of objects into text or numbers, as by `names.astype(str)`"
        with reading(path, remedy), np.load(path) as archive:
            stored = dict(archive)
    else:
        stored = load_tensors(path, expected)
    with reading(path, f"expected {expected}"):
        files = [normalize_path(name) for name in stored["files"]]
        features = stored["features"]
        if torch.is_tensor(features):  # possibly with a gradient, or of a type that NumPy lacks
            features = features.detach().float()
        features = np.asarray(features, np.float32)
        if features.ndim != 2 or features.size == 0 or len(features) != len(files):
            raise ValueError(f"{len(files)} files, features {features.shape}")
    return {**stored, "files": files, "features": features}


def checksum(dataset, vectors, features):
    """Return a number by which --resume notices that names, vectors, features or targets changed.
    """
    content = zlib.crc32(repr((dataset.states, dataset.objects)).encode())
    for array in (dataset.seen, vectors, *features.values(), *dataset.targets.values()):
        content = zlib.crc32(np.ascontiguousarray(array), content)
    return content


# ---- own photos ----------------------------------------------------------------------------------


def make_split(folder, seed=0, share=COMPOSITION_SHARE):
    """Write images.csv with a split, from an images.csv or from photos in folders.

    Where a part of the split is given (train with val, or train with test), the other set is cut
    out of train. The names of states and objects are printed.

    Args:
        folder: str or Path, the folder of images.csv, or of photos in STATE_OBJECT/ or
            STATE/OBJECT/ folders, which may lie in folders train/, val/ and test/.
        seed: int >= 0, the seed of the draw.
        share: float in (0, 0.5), the share of the compositions that become unseen ones of each set
            that is made, see `assign_splits`.

    Raises:
        ValueError: the split is complete already, or none can be made; a number out of range.
    """
    check_value("share", share, float, above=0, below=0.5)
    check_value("seed", seed, int, least=0)
    folder = Path(folder)
    file = folder / "images.csv"
    rows = own_rows(folder)
    if not rows:
        raise ValueError(f"{folder}: expected photos in state_object/ or state/object/ folders, or "
                         "rows in images.csv, found none")
    print_names(rows)
    if not any(row.get("split") for row in rows):
        for row in rows:
            row["split"] = "train"
    phases = set(map(phase_of, rows))
    missing = [phase for phase in PHASES if phase not in phases]
    if not missing or "train" in missing or None in phases:
        raise ValueError(f"{folder} has a split: use it as it is, or remove that column of "
                         "images.csv (or the file, for photos in folders) to make another; only a "
                         "set that no row names is cut out of train")
    training = [row for row in rows if phase_of(row) == "train"]
    made = assign_splits([(row["state"], row["object"]) for row in training], seed, share)
    for row, phase in zip(training, made):
        if phase in missing:
            row["split"] = phase
    write_rows(file, rows[0], [row.values() for row in rows])
    print(f"wrote {file} ({' and '.join(missing)} cut out of train, seed {seed}, share {share:g})")


def print_names(rows):
    """Print the states and objects of rows, and a note on objects that may hold a part of a state.
    """
    for kind in ("state", "object"):
        names = sorted({row[kind] for row in rows})
        print(f"{kind}s: {', '.join(names)}")
    for name, other in itertools.product(names, names):  # now the objects
        if name.endswith(f"_{other}"):
            print(f'note: object "{name}" ends in the name of another object, "{other}": if the '
                  "rest belongs to the state, write STATE__OBJECT/ or STATE/OBJECT/")


def read_photos(folder):
    """Return rows of the photos in FOLDER/images/ or FOLDER/, from the names of their folders.

    Folders are STATE_OBJECT/ or STATE/OBJECT/. If all top folders have names in SPLITS, and one is
    train, they are the split.
    """
    root = folder / "images" if (folder / "images").is_dir() else folder
    photos = list_photos(root)
    top = {photo.split("/")[0] for photo in photos}
    has_split = "train" in top and top <= SPLITS.keys()
    rows = []
    for photo in photos:
        split = ""
        *names, _ = photo.split("/")
        if has_split:
            split, *names = names
        if len(names) == 1:
            names = split_folder_name(names[0])
        names = [normalize_name(name) for name in names]
        if len(names) != 2 or not all(names):
            raise ValueError(f"{root}: expected photos in state_object/ or state/object/ folders, "
                             f"found {photo}")
        rows.append({"image": photo, "state": names[0], "object": names[1], "split": split})
    return rows


def split_folder_name(name):
    """Split a folder's name into state and object at the longest run of `_`, at first if several.

    >>> split_folder_name("wet_dog"), split_folder_name("Corn_(maize)___healthy")
    (['wet', 'dog'], ['Corn_(maize)', 'healthy'])
    >>> split_folder_name("dark_blue_car")
    ['dark', 'blue_car']
    """
    name = name.strip("_ ")
    longest = max(re.findall("_+", name), key=len, default="_")
    return name.split(longest, 1)


def assign_splits(pairs, seed=0, share=COMPOSITION_SHARE):
    """Draw a set, "train", "val" or "test", for each of N images from its (state, object).

    `share` of the compositions become the unseen ones of val, and as many those of test, while
    every state and object keeps a training composition. Of the other compositions' images
    IMAGE_SHARE go to val and as many to test, while each composition keeps one in train.
    ValueError: there are too few images for three sets.
    """
    random = np.random.default_rng(seed)
    compositions, shown = np.unique(pairs, axis=0, return_inverse=True)  # (C, 2), (N,)
    shown = shown.ravel()  # NumPy 2.0 alone returns (N, 1)
    unseen = choose_unseen(compositions.tolist(), share, random)
    split = np.array([unseen.get(composition, "train") for composition in shown.tolist()])

    # All images but one of each seen composition may leave training.
    spare = []
    for composition in range(len(compositions)):
        if composition not in unseen:
            spare.append(random.permutation(np.flatnonzero(shown == composition))[1:])
    # They go to test and to val in turn, so that both get equally many, however few there are.
    spare = random.permutation(np.concatenate(spare))
    number = max(1, round(IMAGE_SHARE * np.sum(split == "train")))
    last = 2 * min(number, len(spare) // 2)
    split[spare[0:last:2]] = "test"
    split[spare[1:last:2]] = "val"
    if set(split) != set(PHASES):
        raise ValueError(f"{len(pairs)} images of {len(compositions)} compositions: too few for "
                         "three sets")
    return split.tolist()


def choose_unseen(compositions, share, random):
    """Draw unseen compositions: {index in compositions: "val" or "test"}.

    Each set gets `share` of the (state, object), or as many as possible: every state and object
    stays in a composition that is not drawn.
    """
    states = Counter(state for state, _ in compositions)
    objects = Counter(object_ for _, object_ in compositions)
    number = 2 * max(1, round(share * len(compositions)))
    unseen = {}
    for index in random.permutation(len(compositions)).tolist():
        state, object_ = compositions[index]
        if len(unseen) < number and states[state] > 1 and objects[object_] > 1:
            unseen[index] = "test" if len(unseen) % 2 == 0 else "val"
            states[state] -= 1
            objects[object_] -= 1
    return unseen


# ---- the command line ----------------------------------------------------------------------------


def print_counts(dataset):
    """Print a table of the numbers of compositions and images, seen and unseen."""
    seen = dataset.seen  # (S, O)
    print(f"{dataset.name}: {len(dataset.states)} states, {len(dataset.objects)} objects, "
          f"{seen.size:,} possible compositions")
    print("      seen  unseen  images of seen  of unseen")
    for phase in PHASES:
        pairs = seen[tuple(dataset.pairs[phase].T)]  # (P,) bool
        images = seen.ravel()[dataset.targets[phase]]  # (N,) bool
        print(f"{phase:5}{pairs.sum():5,}{(~pairs).sum():8,}{images.sum():16,}"
              f"{(~images).sum():11,}")


def parse(argv):
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python data.py photos --make-split --share 0.1")
    add = parser.add_argument
    add("dataset", metavar="DATASET|FOLDER",
        help=f"{', '.join(FOLDERS)}, or the folder of another dataset")
    add("--data-root", default="data", metavar="DIR",
        help="the folder that holds the datasets (default: data)")
    add("--make-split", action="store_true",
        help="write images.csv with a split of your own photos, which lie in STATE_OBJECT/ or "
             "STATE/OBJECT/ folders or are listed in an images.csv (image,state,object). The "
             "longest run of _ in STATE_OBJECT ends the state's name, the first run if several are "
             "as long. Where train is given without val or test, these are cut out of train")
    add("--share", type=float, default=COMPOSITION_SHARE,
        help="for --make-split: the share of the compositions that become unseen in val, and in "
             f"test (default: {COMPOSITION_SHARE})")
    add("--seed", type=int, default=0,
        help="for --make-split: the seed of the draw (default: 0)")
    return parser.parse_args(argv)


@shell.command
def main(argv=None):
    """Check a dataset, after making its split if asked."""
    options = parse(argv)
    if options.make_split:
        make_split(locate(options.dataset, options.data_root), options.seed, options.share)
    dataset = load(options.dataset, options.data_root)
    print_counts(dataset)
    for note in dataset.notes:
        print(f"note: {note}")
    source = finished_features(dataset)
    if source is not None:
        read_features(source)
        return
    problem = missing_photos(dataset)
    if problem:
        raise ValueError(problem)
    repeated = repeated_photos(dataset)
    if repeated:
        groups = [" = ".join(images) for images in repeated]
        print(f"note: files with the same bytes in several sets: {shell.shorten(groups)}")
    broken = broken_photos(dataset)
    if broken:
        print(f"note: cannot be read, and --skip-broken leaves out: {with_reasons(broken)}")


if __name__ == "__main__":
    main()
