"""Compositions, splits and images of a dataset.

    python data.py DATASET|FOLDER                 # says what is there and what is wrong, decodes
                                                  # each photo that features are to be made of
    python data.py FOLDER --make-split            # own photos in folders -> images.csv with a split

A folder has the layout that this field's repositories share
(`compositional-split-natural/*_pairs.txt`, a metadata `.t7`, `images/`),
or an `images.csv` with the columns image, state, object, split.

N images, S states, O objects, P pairs, F numbers a feature;
composition (s, o) = s*O + o; a phase (train, val, test) is a set of images.
"""

import argparse
import csv
import io
import itertools
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lab import shell
from lab.files import check_archive, load_tensors, reading, write_rows
from lab.photos import broken_photos, missing_photos, photo_files, what_stayed_out, with_reasons
from feasibility import read_pairs

PHASES = "train", "val", "test"
FOLDERS = {"utzappos": "ut-zap50k", "mitstates": "mit-states", "cgqa": "cgqa", "shapes": "shapes"}
DOWNLOADED = "utzappos", "mitstates", "cgqa"  # those of these that download.py fetches
SPLIT = "compositional-split-natural"
METADATA = f"metadata_{SPLIT}.t7"
METADATA_KEYS = "image", "attr", "obj", "set"
FEATURES = "features.npz", "resnet18_featurers.t7"  # the first of these that is there counts

# The columns of images.csv, and what this field calls some (in any case).
REQUIRED = "image", "state", "object"
COLUMNS = {"attr": "state", "obj": "object", "set": "split"}

COMPOSITION_SHARE = 0.2  # of the compositions, unseen in val, and as many in test: 6 and 6 of 28
IMAGE_SHARE = 0.15  # of the seen compositions' images, in val, and as many in test


class Dataset(NamedTuple):
    """What a folder holds, read by `load`."""

    name: str                       # a key of FOLDERS, or the folder's name
    folder: Path
    states: list[str]               # S names, sorted
    objects: list[str]              # O names, sorted
    pairs: dict[str, np.ndarray]    # phase -> (P, 2) int64 state and object, unique, ascending
    images: dict[str, list[str]]    # phase -> N names, `/` between folders; `path` finds the file
    targets: dict[str, np.ndarray]  # phase -> (N,) int64, s*O + o
    feasible: np.ndarray | None     # (S, O) bool, the truth where feasible_pairs.txt is there
    notes: list[str]                # what was odd but is no obstacle
    upright: bool = True            # photos are turned upright by their EXIF tag

    @property
    def seen(self):
        """(S, O) bool: the training pairs, and whatever else training images show."""
        seen = np.zeros((len(self.states), len(self.objects)), bool)
        seen[tuple(self.pairs["train"].T)] = True
        seen.flat[self.targets["train"]] = True
        return seen

    def candidates(self, phase):
        """(S*O,) bool: the closed world of a phase, its own pairs and the seen ones."""
        allowed = self.seen
        allowed[tuple(self.pairs[phase].T)] = True
        return allowed.ravel()

    @property
    def compositions(self):
        """`state object` of every composition, S*O texts in the order s*O + o."""
        return [f"{state} {object_}" for state in self.states for object_ in self.objects]

    @property
    def every_image(self):
        """The images of all sets, each once, in the order of PHASES."""
        return list(dict.fromkeys(itertools.chain(*self.images.values())))

    def path(self, image):
        """Where an image lies: under `images/`, or (own data) beside images.csv."""
        inside = self.folder / "images" / image
        return inside if inside.exists() else self.folder / image


# ---- finding and reading a folder ----------------------------------------------------------------


def load(name, root="data"):
    """Read a dataset by its name (a folder of `root`) or by its folder: Dataset.

    Rows with NA in place of a name, or with a pair in no list, are left out; of others the set, and
    not the pair, says where an image belongs. FileNotFoundError: no such folder or file.
    ValueError: the first thing in it that is not as expected, with its file and line.
    """
    folder = locate(name, root)
    read = read_own if (folder / "images.csv").exists() else read_published
    lists, rows = read(folder)

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
                             "val and test each need some")
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
    """The folder that `name` means: root/ut-zap50k for utzappos and so on (FOLDERS).

    Any other name is a folder, or else a folder of `root`. FileNotFoundError if it is not there.
    """
    places = [Path(name), Path(root, name)]
    if name in FOLDERS:
        places = [Path(root, FOLDERS[name])]
    for folder in places:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"no dataset {str(name)!r}: no folder {shell.shorten(places)}; expected a folder, or a name "
        "whose folder `python download.py NAME --data-root DIR` fetches")


def read_published(folder):
    """The shared layout: phase -> list of (state, object), and rows (image, (state, object), set).
    """
    if not (folder / SPLIT).is_dir():
        raise ValueError(
            f"{folder}: expected {SPLIT}/ with train_pairs.txt, val_pairs.txt, test_pairs.txt, or "
            "an images.csv (image,state,object,split), found neither; `python data.py FOLDER "
            "--make-split` makes an images.csv of own photos")
    lists = {phase: read_pairs(folder / SPLIT / f"{phase}_pairs.txt") for phase in PHASES}
    rows = []
    for image, state, object_, phase in read_metadata(folder / METADATA):
        rows.append((normalize_path(image), (normalize_name(state), normalize_name(object_)), phase))
    return lists, rows


def read_metadata(file, keys=METADATA_KEYS):
    """Rows of texts, by default (image, state, object, set), from a `.t7` list of dicts.

    Runs no code in the file. ValueError: it holds something else.
    """
    stored = load_tensors(file)
    expected = f"expected a list of dicts of texts {', '.join(keys)}, by torch.save"
    with reading(file, expected):
        # `str.strip` refuses what is no text.
        return [tuple(str.strip(row[key]) for key in keys) for row in stored]


def read_own(folder):
    """images.csv: as `read_published`, the lists of pairs from its rows."""
    file = folder / "images.csv"
    lists = {phase: [] for phase in PHASES}
    rows = []
    for line, row in read_table(file):
        phase = row.get("split", "").lower()
        if phase not in PHASES:
            raise ValueError(f"{file} line {line}: expected a split train, val or test, found "
                             f"{phase!r}; `python data.py FOLDER --make-split` makes a split where "
                             "there is none")
        pair = row["state"], row["object"]
        if "NA" not in pair:
            lists[phase].append(pair)
            rows.append((normalize_path(row["image"]), pair, phase))
    return lists, rows


def read_table(file):
    """Yield line and {column in lower case: text} of each row of a table of images.

    As spreadsheets write it: `,`, `;`, `|` or tab between the columns, empty rows, any further
    columns; and attr, obj, set for state, object, split. ValueError names the first line that is
    not as expected.
    """
    with reading(file, "expected a table of image,state,object,split in UTF-8"):
        text = file.read_text(encoding="utf-8-sig")
        header = text.partition("\n")[0]
        separator = max(",;\t|", key=header.count)
        # Not splitlines(): it cuts within quotes, and at more than line ends.
        lines = io.StringIO(text, newline="")
        reader = csv.reader(lines, delimiter=separator, skipinitialspace=True)
        names = [name.strip().lower() for name in next(reader, ())]
        columns = [COLUMNS.get(name, name) for name in names]
        if [columns.count(name) for name in REQUIRED] != [1, 1, 1]:
            raise ValueError(f"columns {header!r}")
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if any(cells):
                row = dict(itertools.zip_longest(columns, cells, fillvalue=""))
                if len(cells) > len(columns) or "" in [row[name] for name in REQUIRED]:
                    raise ValueError(f"{file} line {reader.line_num}: found {cells}")
                row["state"] = normalize_name(row["state"])
                row["object"] = normalize_name(row["object"])
                yield reader.line_num, row


def read_feasible(folder, index, shape):
    """(S, O) bool from feasible_pairs.txt (`state object` a line), None without that file.

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
    """Notes on what training does not show, and on what images cannot tell."""
    notes = []
    states, objects = np.divmod(dataset.targets["train"], len(dataset.objects))  # (N,) each
    unknown = [*np.delete(dataset.states, states), *np.delete(dataset.objects, objects)]
    if unknown:
        notes.append(f"no training image shows {shell.shorten(unknown)}")
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

    rows = sum(map(len, dataset.images.values()))
    distinct = sum(len(set(images)) for images in dataset.images.values())
    shared = distinct - len(dataset.every_image)
    if rows > distinct:
        notes.append(f"rows of an image that its set has already, each of which counts: "
                     f"{rows - distinct:,}")
    if shared:
        notes.append(f"images in more than one set: {shared:,}")
    return notes


def normalize_path(image):
    """An image's name with `/` between folders, and no `./` before."""
    return image.replace("\\", "/").removeprefix("./")


def normalize_name(name):
    """A state's or object's name without blanks around it, one blank within."""
    return " ".join(name.split())


# ---- what features are made of -------------------------------------------------------------------


def finished_features(dataset, file=None):
    """The file whose features are taken as they are; None: they are made of the photos.

    file: one that is named for it, or "pixels", which are made. Else a file in the folder, but the
    cache of an extraction only where all photos are gone: otherwise it is brought up to date from
    them.
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
    """The dict in a .npz or torch.save file, with `files` a list and `features` (N, F) float32.

    Whatever the name's ending, the content decides which of the two it is. ValueError says what is
    not as expected.
    """
    if any(name.endswith(".npy") for name in check_archive(path)):
        with reading(path, "save it anew by np.savez"), np.load(path) as archive:
            stored = dict(archive)
    else:
        stored = load_tensors(path)
    with reading(path, "expected `files`, N names, and `features`, (N, F) numbers"):
        files = [normalize_path(name) for name in stored["files"]]
        features = stored["features"]
        if torch.is_tensor(features):  # with a gradient, or of a type that NumPy lacks
            features = features.detach().float()
        features = np.asarray(features, np.float32)
        if features.ndim != 2 or features.size == 0 or len(features) != len(files):
            raise ValueError(f"{len(files)} files, features {features.shape}")
        row_of = dict(zip(files, features))
        if len(row_of) < len(files):  # an image of two sets may be named twice
            for name, row in zip(files, features):
                if (row != row_of[name]).any():
                    raise ValueError(f"several rows that differ for {name}")
    return {**stored, "files": files, "features": features}


def checksum(dataset, vectors, features):
    """A number by which --resume notices that the data changed."""
    content = zlib.crc32(repr((dataset.states, dataset.objects)).encode())
    for array in (dataset.seen, vectors, *features.values(), *dataset.targets.values()):
        content = zlib.crc32(np.ascontiguousarray(array), content)
    return content


# ---- own photos ----------------------------------------------------------------------------------


def make_split(folder, seed=0, share=COMPOSITION_SHARE):
    """Write images.csv with a split, from an images.csv without one or from photos in folders.

    share: of the compositions, see `assign_splits`. ValueError: a split is there, or none can be made.
    """
    folder = Path(folder)
    file = folder / "images.csv"
    if file.exists():
        rows = [row for _, row in read_table(file)]
    else:
        rows = read_photos(folder)
    if not rows:
        raise ValueError(f"{folder}: expected photos in state_object/ or state/object/ folders, or "
                         "rows in images.csv, found none")
    if any(row.get("split") for row in rows):
        raise ValueError(f"{file} has a split: remove that column (or the file, for photos in "
                         "folders) to make another")
    split = assign_splits([(row["state"], row["object"]) for row in rows], seed, share)
    for row, phase in zip(rows, split):
        row["split"] = phase
    write_rows(file, rows[0], [row.values() for row in rows])
    print(f"wrote {file} (seed {seed}, share {share:g})")


def read_photos(folder):
    """Rows from photos in `state_object/` or `state/object/` folders, in FOLDER/images or FOLDER.
    """
    root = folder / "images" if (folder / "images").is_dir() else folder
    photos, left_out = photo_files(root)
    rows = []
    for photo in photos:
        *names, _ = photo.split("/")
        if len(names) == 1:
            names = split_folder_name(names[0])
        names = [normalize_name(name) for name in names]
        if len(names) != 2 or not all(names):
            raise ValueError(f"{root}: expected photos in state_object/ or state/object/ folders, "
                             f"found {photo}")
        rows.append({"image": photo, "state": names[0], "object": names[1]})
    if left_out:
        print(f"note: {what_stayed_out(left_out)}")
    return rows


def split_folder_name(name):
    """State and object of a folder: the longest run of `_`, of equals the first, is between them.

    >>> split_folder_name("wet_dog"), split_folder_name("Corn_(maize)___healthy")
    (['wet', 'dog'], ['Corn_(maize)', 'healthy'])
    >>> split_folder_name("dark_blue_car")
    ['dark', 'blue_car']
    """
    name = name.strip("_ ")
    longest = max(re.findall("_+", name), key=len, default="_")
    return name.split(longest, 1)


def assign_splits(pairs, seed=0, share=COMPOSITION_SHARE):
    """A set for each of N images from its (state, object): list of N of "train", "val", "test".

    `share` of the compositions become val's unseen ones and as many test's, while every state and
    object keeps a training composition; of the others' images IMAGE_SHARE go to val and as many to
    test, and each composition keeps one. ValueError: too few for three sets.
    """
    random = np.random.default_rng(seed)
    compositions, shown = np.unique(pairs, axis=0, return_inverse=True)  # (C, 2), (N,)
    shown = shown.ravel()  # NumPy 2.0 alone returns (N, 1)
    unseen = choose_unseen(compositions.tolist(), share, random)
    split = np.array([unseen.get(composition, "train") for composition in shown.tolist()])

    # Of each seen composition all images but one may leave training.
    spare = []
    for composition in range(len(compositions)):
        if composition not in unseen:
            spare.append(random.permutation(np.flatnonzero(shown == composition))[1:])
    # In turns to test and to val, so that both get as many, however few there are.
    spare = random.permutation(np.concatenate(spare))
    wanted = max(1, round(IMAGE_SHARE * np.sum(split == "train")))
    last = 2 * min(wanted, len(spare) // 2)
    split[spare[0:last:2]] = "test"
    split[spare[1:last:2]] = "val"
    if set(split) != set(PHASES):
        raise ValueError(f"{len(pairs)} images of {len(compositions)} compositions: too few for "
                         "three sets")
    return split.tolist()


def choose_unseen(compositions, share, random):
    """{place in compositions: "val" or "test"}: `share` of (state, object) each, or as many as can
    be.

    Every state and object stays in a composition that is not chosen.
    """
    states = Counter(state for state, _ in compositions)
    objects = Counter(object_ for _, object_ in compositions)
    wanted = 2 * max(1, round(share * len(compositions)))
    unseen = {}
    for place in random.permutation(len(compositions)).tolist():
        state, object_ = compositions[place]
        if len(unseen) < wanted and states[state] > 1 and objects[object_] > 1:
            unseen[place] = "test" if len(unseen) % 2 == 0 else "val"
            states[state] -= 1
            objects[object_] -= 1
    return unseen


# ---- the command line ----------------------------------------------------------------------------


def print_counts(dataset):
    """The table of compositions and images, seen and unseen."""
    seen = dataset.seen  # (S, O)
    print(f"{dataset.name}: {len(dataset.states)} states, {len(dataset.objects)} objects, "
          f"{seen.size:,} compositions")
    print("      seen  unseen  images of seen  of unseen")
    for phase in PHASES:
        pairs = seen[tuple(dataset.pairs[phase].T)]  # (P,) bool
        images = seen.ravel()[dataset.targets[phase]]  # (N,) bool
        print(f"{phase:5}{pairs.sum():5,}{(~pairs).sum():8,}{images.sum():16,}"
              f"{(~images).sum():11,}")


def parse(argv):
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("dataset", metavar="DATASET|FOLDER",
        help=f"{', '.join(FOLDERS)}, or the folder of another")
    add("--data-root", default="data", metavar="DIR",
        help="where datasets and word vectors are (default: data)")
    add("--make-split", action="store_true",
        help="divide own photos, in state_object/ or state/object/ folders or named in an "
             "images.csv (image,state,object); the longest run of _, of equals the first, in "
             "state_object ends the state's name")
    add("--share", type=shell.number(above=0, below=0.5), default=COMPOSITION_SHARE,
        help="of --make-split: the share of compositions that are unseen in val, and in test "
             f"(default: {COMPOSITION_SHARE})")
    add("--seed", type=shell.number(int, least=0), default=0,
        help="of --make-split (default: 0)")
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
    if finished_features(dataset) is not None:
        return
    unnamed = len(photo_files(dataset.folder)[0]) - len(dataset.every_image)
    if unnamed > 0:
        print(f"note: photos in {dataset.folder} that no set has: {unnamed:,}")
    broken = broken_photos(dataset)
    if broken:
        print(f"note: cannot be read, and --skip-broken leaves out: {with_reasons(broken)}")
    problem = missing_photos(dataset)
    if problem:
        raise ValueError(problem)


if __name__ == "__main__":
    main()
