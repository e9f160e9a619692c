"""Compositions, splits and images of a dataset: `python data.py DATASET|FOLDER` says what is there and what is wrong.

A folder has the layout that this field's repositories share (`compositional-split-natural/*_pairs.txt`, a metadata
`.t7`, `images/`) or an `images.csv` with the columns image, state, object, split.
N images, S states, O objects, C = S*O compositions, P pairs; composition (s, o) = s*O + o; a phase is a set of images.
"""

import argparse
import csv
import io
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import common

PHASES = "train", "val", "test"
FOLDERS = {"utzappos": "ut-zap50k", "mitstates": "mit-states", "cgqa": "cgqa"}
SPLIT = "compositional-split-natural"
SYNONYMS = {"training": "train", "validation": "val", "valid": "val", "testing": "test",
            "train": "train", "val": "val", "test": "test"}  # what an images.csv may call them, in any case
FEATURES = "features.npz", "resnet18_featurers.t7"
PHOTOS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"}


class Dataset(NamedTuple):
    """What a folder holds, read by `load`."""

    name: str                       # "utzappos", "mitstates", "cgqa", or the folder's name
    folder: Path
    states: list[str]               # S names, sorted
    objects: list[str]              # O names, sorted
    pairs: dict[str, np.ndarray]    # phase -> (P, 2) int64 state and object, the phase's own list, unique, ascending
    images: dict[str, list[str]]    # phase -> N names, `/` between folders; `path` finds the file
    targets: dict[str, np.ndarray]  # phase -> (N,) int64, s*O + o
    feasible: np.ndarray | None     # (S, O) bool, the truth where the folder has feasible_pairs.txt
    notes: list[str]                # what was odd but is no obstacle

    @property
    def seen(self):
        """(S, O) bool: the training pairs, and whatever else training images show."""
        seen = np.zeros(len(self.states) * len(self.objects), bool)
        seen[self.pairs["train"] @ [len(self.objects), 1]] = True
        seen[self.targets["train"]] = True
        return seen.reshape(len(self.states), len(self.objects))

    def candidates(self, phase):
        """(S*O,) bool: the closed world of a phase, its own pairs and the seen ones."""
        allowed = self.seen.ravel()
        allowed[self.pairs[phase] @ [len(self.objects), 1]] = True
        return allowed

    def path(self, image):
        """Where an image lies: under `images/`, or (own data) beside images.csv."""
        path = self.folder / "images" / image
        return path if path.exists() or not (self.folder / image).exists() else self.folder / image


def load(name, root="data"):
    """Read a dataset by its name (a folder of `root`) or by its folder: Dataset.

    ValueError names every obstacle at once, such as a set without images; FileNotFoundError: no such folder.
    """
    dataset, problems = read(locate(name, root))
    if problems:
        raise ValueError(f"{dataset.folder}: {'; '.join(problems)}")
    return dataset


def locate(name, root="data"):
    """The folder that `name` means: root/ut-zap50k for utzappos and so on, else that folder, else root/name."""
    folders = [Path(root, FOLDERS[name])] if name in FOLDERS else [Path(name), Path(root, name)]
    for folder in folders:
        if folder.is_dir():
            return folder
    known = f"`python data.py {name} --download` fetches it" if name in FOLDERS else f"names: {', '.join(FOLDERS)}"
    raise FileNotFoundError(f"no dataset {str(name)!r}: no folder {' or '.join(map(str, folders))}; {known}")


def read(folder):
    """As much of a folder as can be read: (Dataset, problems); problems are the obstacles, none if it is usable.

    `pairs` then has a fourth list, "all", where an all_pairs.txt stands in for missing ones.
    """
    folder, notes, problems = Path(folder), [], []
    layout = read_table if (folder / "images.csv").exists() else read_published
    lists, rows = layout(folder, notes, problems)
    names = [sorted({pair[part] for pairs in lists.values() for pair in pairs}) for part in (0, 1)]
    states, objects = ({name: i for i, name in enumerate(part)} for part in names)
    code = {(s, o): states[s] * len(objects) + objects[o] for pairs in lists.values() for s, o in pairs}
    images, targets = members(rows, code, notes, problems)
    pairs = {phase: np.array(sorted(code[pair] for pair in own), np.int64) for phase, own in lists.items()}
    pairs = {phase: np.stack(np.divmod(own, max(len(objects), 1)), 1) for phase, own in pairs.items()}
    feasible = read_feasible(folder, states, objects, problems)
    name = folder.resolve().name
    name = dict(zip(FOLDERS.values(), FOLDERS)).get(name, name)
    dataset = Dataset(name, folder, *names, pairs, images, targets, feasible, notes)
    notes += oddities(dataset)
    return dataset, problems


def read_published(folder, notes, problems):
    """The shared layout: phase -> list of (state, object), and rows of (image, state, object, set)."""
    where = folder / SPLIT if (folder / SPLIT).is_dir() else folder
    if not any(folder.glob("metadata*")) and not any(where.glob("*_pairs.txt")):
        problems.append(f"neither {SPLIT}/ nor images.csv; `python data.py` makes one of own photos with --make-split, "
                        f"and fetches {', '.join(FOLDERS)} with --download")
        return {phase: [] for phase in PHASES}, []
    lists = {phase: read_pairs(where / f"{phase}_pairs.txt", notes, problems) for phase in PHASES}
    if not all(lists.values()) and (where / "all_pairs.txt").exists():
        lists["all"] = read_pairs(where / "all_pairs.txt", notes, problems)
    return lists, read_metadata(folder / f"metadata_{SPLIT}.t7", problems)


def read_pairs(file, notes, problems):
    """One `state object` a line: list of pairs, each once."""
    lines = [line.split() for line in read_text(file, problems).splitlines()]
    wrong = [f"line {number} {' '.join(words)!r}" for number, words in enumerate(lines, 1) if len(words) not in (0, 2)]
    if wrong:
        problems.append(f"{file.name}: expected `state object` a line, found {some(wrong)}")
    pairs = [tuple(words) for words in lines if len(words) == 2]
    if repeated := len(pairs) - len(set(pairs)):
        notes.append(f"{file.name} repeats {count(repeated, 'pair')}: each counts once")
    if lines and not pairs:
        problems.append(f"{file.name} lists no pair")
    return list(dict.fromkeys(pairs))


def read_text(file, problems):
    """A text file, empty with a problem where it is missing, empty or no UTF-8."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{file.name} is missing" if isinstance(error, FileNotFoundError) else f"{file.name}: {error}")
        return ""
    if not text.strip():
        problems.append(f"{file.name} is empty")
    return text


def read_metadata(file, problems, keys=("image", "attr", "obj", "set")):
    """Rows of (image, state, object, set) from a `.t7` list of dicts `image, attr, obj, set`, running no code in it."""
    try:
        rows = torch.load(file, map_location="cpu", weights_only=True)
        return [tuple(str(row[key]) for key in keys) for row in rows]
    except FileNotFoundError:
        problems.append(f"{file.name} is missing: it says what each image shows and in which set it is")
    except Exception as error:  # torch, zip and pickle raise many types for a bad file
        problems.append(f"{file.name} is no torch.save of a list of dicts with {', '.join(keys)} "
                        f"({type(error).__name__}: {str(error)[:80]})")
    return []


def read_table(folder, notes, problems):
    """images.csv: phase -> list of (state, object) that its rows show, and rows of (image, state, object, set)."""
    table = read_csv(folder / "images.csv", problems)
    if table and "split" not in table[0]:
        problems.append(f"images.csv has no column split: `python data.py {folder} --make-split` adds it")
        table = []
    phases = [SYNONYMS.get(row["split"].lower(), row["split"]) for row in table]
    rows = [(row["image"], row["state"], row["object"], phase) for row, phase in zip(table, phases)]
    wrong = [f"{row[0]} {row[3]!r}" for row in rows if row[3] not in (*PHASES, "NA")]
    if wrong:
        problems.append(f"images.csv: split must be train, val or test, found {some(wrong)}")
    shown = [row for row in rows if "NA" not in row]
    return {phase: list(dict.fromkeys(row[1:3] for row in shown if row[3] == phase)) for phase in PHASES}, rows


def read_csv(file, problems):
    """Rows of a table of images as dicts, lower-case keys, no stray blanks; `,`, `;` or tab between the columns."""
    text = read_text(file, problems)
    header = text.partition("\n")[0]
    lines = io.StringIO(text, newline="")  # not splitlines(), which cuts within quotes and at more than line ends
    table = csv.DictReader(lines, delimiter=max(",;\t", key=header.count), restval="", restkey="")
    try:
        rows = [{key.strip().lower(): value.strip() for key, value in row.items() if key} for row in table]
    except csv.Error as error:
        problems.append(f"{file.name} after line {table.line_num}: {error}")
        return []
    if text and not (rows and {"image", "state", "object"} <= rows[0].keys()):
        problems.append(f"{file.name}: expected image,state,object,split and rows of these, found {header.strip()!r}")
        return []
    holes = [number for number, row in enumerate(rows, 2) if not (row["image"] and row["state"] and row["object"])]
    if holes:
        problems.append(f"{file.name}: image, state or object is empty in row {some(holes)}")
    return rows


def read_feasible(folder, states, objects, problems):
    """(S, O) bool from feasible_pairs.txt (`state object` a line), None without that file."""
    if not (folder / "feasible_pairs.txt").exists():
        return None
    feasible = np.zeros((len(states), len(objects)), bool)
    pairs = read_pairs(folder / "feasible_pairs.txt", [], problems)
    known = [(states[s], objects[o]) for s, o in pairs if s in states and o in objects]
    if len(known) < len(pairs):
        problems.append(f"feasible_pairs.txt: {count(len(pairs) - len(known), 'pair')} of other states or objects")
    feasible[tuple(np.array(known, np.int64).reshape(-1, 2).T)] = True
    return feasible


def members(rows, code, notes, problems):
    """Rows to the sets they name, which alone decides: phase -> N names, phase -> (N,) int64. The skipped are noted."""
    images, targets = ({phase: [] for phase in PHASES} for _ in range(2))
    skipped = Counter()
    for image, state, thing, phase in rows:
        if "NA" in (state, thing, phase):
            skipped["NA"] += 1
        elif (state, thing) not in code:
            skipped["a pair in no list"] += 1
        elif phase not in PHASES:
            skipped[f"the set {phase!r}"] += 1
        else:
            images[phase].append(plain(image))
            targets[phase].append(code[state, thing])
    notes += [f"{count(number, 'row')} with {why} skipped" for why, number in skipped.items()]
    if rows and not any(images.values()):
        problems.append(f"none of {count(len(rows), 'row')} names a listed pair and a set, the first is {rows[0]}")
    elif rows:
        problems += [f"no image is left in the set {phase!r}: train, val and test each need some "
                     "(--make-split makes them for own data without a split)" for phase in PHASES if not images[phase]]
    return images, {phase: np.array(own, np.int64) for phase, own in targets.items()}


def oddities(dataset):
    """Notes on what training does not show, with the accuracy ceilings that follow, and on what images cannot tell."""
    if not all(map(len, dataset.targets.values())):
        return []
    O, notes = len(dataset.objects), []
    shown = np.zeros(dataset.seen.shape, bool)
    shown.ravel()[dataset.targets["train"]] = True
    listed = np.zeros(shown.shape, bool)
    listed[tuple(dataset.pairs["train"].T)] = True
    if without := (listed & ~shown).sum():
        notes.append(f"{count(without, 'training pair')} without a training image, kept as seen")
    if beyond := (shown & ~listed).sum():
        notes.append(f"{count(beyond, 'composition')} with training images but not in the training list, taken as seen")
    for part, what, names in (0, "state", dataset.states), (1, "object", dataset.objects):
        known = shown.any(1 - part)
        if not known.all():
            right = [f"{known[divmod(dataset.targets[phase], O)[part]].mean():.1%} of {phase}" for phase in PHASES[1:]]
            unknown = some(name for name, there in zip(names, known) if not there)
            notes.append(f"{count((~known).sum(), what)} without a training image ({unknown}): "
                         f"an accuracy ceiling of {' and '.join(right)}")
    for phase in PHASES[1:]:
        target, allowed = dataset.targets[phase], dataset.candidates(phase)
        if outside := (~allowed[target]).sum():
            notes.append(f"{count(outside, phase + ' image')} of pairs in neither the {phase} nor the training list: "
                         f"a ceiling of {allowed[target].mean():.1%} in the closed world")
        if dataset.seen.ravel()[target].all():
            notes.append(f"no {phase} image shows an unseen composition: only the seen half can be evaluated")
    times = Counter(image for phase in PHASES for image in set(dataset.images[phase]))
    if shared := sum(number > 1 for number in times.values()):
        notes.append(f"{count(shared, 'image')} in more than one set")
    return notes


def missing_files(dataset):
    """Problems with what features come from: each image needs a row in a feature file or a file of its own."""
    problems = []
    images = [image for phase in PHASES for image in dataset.images[phase]]
    covered = feature_names(dataset.folder, problems)
    lost = [image for image in images if image not in covered and not dataset.path(image).exists()]
    if lost:
        problems.append(f"{len(lost):,} of {count(len(images), 'image')} found neither in images/ nor "
                        f"in {' or '.join(FEATURES)}: {some(lost)}")
    return problems


def feature_names(folder, problems):
    """The images that a feature file in the folder covers: a set of names."""
    file = next((folder / name for name in FEATURES if (folder / name).exists()), None)
    if not file:
        return set()
    try:
        saved = np.load(file) if file.suffix == ".npz" else torch.load(file, map_location="cpu", weights_only=True)
        return {plain(str(name)) for name in saved["files"]}
    except Exception as error:  # NumPy, zip, torch and pickle raise many types for a bad file
        problems.append(f"{file.name} has no readable `files` ({type(error).__name__}: {str(error)[:80]})")
        return set()


def load_tensors(path):
    """`torch.load` of plain data only: tensors, and NumPy arrays and scalars of floats and strings."""
    array, scalar = np.zeros(0).__reduce__()[0], np.float32(0).__reduce__()[0]
    allowed = [np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "U"))]
    for module in "numpy.core.multiarray", "numpy._core.multiarray":  # as NumPy 1 and 2 call it
        allowed += [(array, f"{module}._reconstruct"), (scalar, f"{module}.scalar")]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # those of pickle and zip have no common class
        raise ValueError(f"{path}: no tensors by torch.save ({' '.join(str(error).split())[:200]})") from error


def read_features(path):
    """The dict in a .npz or torch.save file, with `files` a list and `features` an array (N,F), or ValueError."""
    try:
        stored = dict(np.load(path, allow_pickle=False)) if Path(path).suffix == ".npz" else load_tensors(path)
    except OSError:
        raise
    except Exception as error:  # of zip, pickle and NumPy
        raise ValueError(f"{path}: not a NumPy .npz archive of plain arrays ({error})") from error
    if not isinstance(stored, dict) or not {"files", "features"} <= set(stored):
        holds = ", ".join(map(str, stored)) if isinstance(stored, dict) else f"a {type(stored).__name__}"
        raise ValueError(f"{path}: holds {holds[:200]}; expected `files` (N names) and `features` (N, F)")
    files = [plain(str(name)) for name in stored["files"]]
    features = np.asarray(stored["features"])
    if features.ndim != 2 or len(features) != len(files) or features.dtype.kind not in "fiu":
        raise ValueError(f"{path}: {len(files):,} files need (N, F) numbers, not {features.shape} {features.dtype}")
    last = dict(zip(files, features))
    if twice := len(last) < len(files) and {name for name, row in zip(files, features) if (row != last[name]).any()}:
        raise ValueError(f"{path}: several rows that differ for {some(sorted(twice))}; expected one for each name")
    return {**stored, "files": files, "features": features}


def report(dataset, problems):
    """Print the counts that papers give, the notes, and the problems."""
    seen, total = dataset.seen, dataset.seen.size
    listed = {tuple(pair) for pairs in dataset.pairs.values() for pair in pairs}
    print(f"{dataset.name}: {count(len(dataset.states), 'state')}, {count(len(dataset.objects), 'object')}, "
          f"{count(total, 'composition')}; {len(listed):,} listed, {total - len(listed):,} in no list")
    print(f"{'':12}{'seen':>8}{'unseen':>8}{'images':>10}{'of seen':>10}{'of unseen':>10}")
    for phase in PHASES:
        known, old = seen[tuple(dataset.pairs[phase].T)], seen.ravel()[dataset.targets[phase]]
        figures = known.sum(), (~known).sum(), len(old), old.sum(), (~old).sum()
        print(f"{phase:12}{figures[0]:8,}{figures[1]:8,}" + "".join(f"{figure:10,}" for figure in figures[2:]))
    for kind, lines in ("note", dataset.notes), ("problem", problems):
        for line in lines:
            print(f"{kind}: {line}")


def make_split(folder, seed=0):
    """Write images.csv with a split, from an images.csv without one or else from the names of the photos' folders."""
    folder, problems = Path(folder), []
    file = folder / "images.csv"
    rows = read_csv(file, problems) if file.exists() else read_photos(folder)
    if problems:
        raise ValueError("; ".join(problems))
    if any(row.get("split") for row in rows):
        raise ValueError(f"{file} has a split: remove that column (or the file, for photos in folders) to make another")
    again = [image for image, times in Counter(row["image"] for row in rows).items() if times > 1]
    if again:
        raise ValueError(f"{file}: an image shows one composition, but these are listed again: {some(again)}")
    split = divide([(row["state"], row["object"]) for row in rows], seed)
    with common.writing(file) as out:
        table = csv.DictWriter(out, list(dict.fromkeys([*rows[0], "split"])), lineterminator="\n")
        table.writeheader()
        table.writerows(row | {"split": phase} for row, phase in zip(rows, split))
    print(f"wrote {file} (seed {seed})")


def read_photos(folder):
    """Rows from photos in `state_object/` or `state/object/` folders, in FOLDER/images or else in FOLDER itself."""
    root = folder / "images" if (folder / "images").is_dir() else folder
    photos = sorted(path.relative_to(root) for path in root.rglob("*") if path.suffix.lower() in PHOTOS)
    photos = [photo for photo in photos if not any(part.startswith((".", "__MACOSX")) for part in photo.parts)]
    rows, astray = [], []
    for photo in photos:
        parts = photo.parts[:-1] if len(photo.parts) != 2 else photo.parts[0].split("_", 1)
        if len(parts) != 2 or not all(parts):
            astray.append(photo.as_posix())
        else:
            rows.append({"image": photo.as_posix(), "state": parts[0], "object": parts[1]})
    if astray or not rows:
        found = f"{count(len(astray), 'photo')} elsewhere: {some(astray)}" if astray else "no photo"
        raise ValueError(f"{root}: expected photos in state_object/ or state/object/ folders, found {found}")
    doubtful = {photo.parts[0] for photo in photos if len(photo.parts) == 2 and photo.parts[0].count("_") > 1}
    if doubtful:
        print(f"note: the first _ ends the state's name in {some(sorted(doubtful))}; state/object/ folders are exact")
    return rows


def divide(pairs, seed=0, share=0.15):
    """A set for each of N images from its (state, object): list of N of "train", "val", "test".

    `share` of the compositions become val's unseen ones and as many test's, while every state and object keeps a
    training composition; of the others' images `share` go to val and as many to test, and each composition keeps one.
    """
    rng, own, held = np.random.default_rng(seed), {}, {}
    for image, pair in enumerate(pairs):
        own.setdefault(pair, []).append(image)
    states, objects = Counter(s for s, _ in own), Counter(o for _, o in own)
    most = 2 * max(1, round(share * len(own)))
    for state, thing in map(sorted(own).__getitem__, rng.permutation(len(own))):
        if len(held) < most and states[state] > 1 and objects[thing] > 1:
            held[state, thing] = PHASES[2 - len(held) % 2]
            states[state] -= 1
            objects[thing] -= 1
    split = [held.get(pair, "train") for pair in pairs]
    spare = rng.permutation([i for pair in sorted(own) if pair not in held for i in rng.permutation(own[pair])[1:]])
    each = min(max(1, round(share * split.count("train"))), len(spare) // 2)
    for place, image in enumerate(spare[:2 * each].astype(int)):
        split[image] = PHASES[2 - place % 2]
    if set(split) != set(PHASES):
        raise ValueError(f"{count(len(pairs), 'image')} of {count(len(own), 'composition')}: too few for three sets")
    return split


def plain(image):
    """An image's name with `/` between folders and no `./` before."""
    return image.replace("\\", "/").removeprefix("./")


def count(number, what):
    """`1 row`, `1,234 rows`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def some(names, most=5):
    """The first few of many names, and how many more."""
    names = list(map(str, names))
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


@common.command
def main(argv=None):
    """Check a dataset, after making its split or downloading it if asked: exit status 1 if it cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("dataset", metavar="DATASET|FOLDER", help=f"{', '.join(FOLDERS)}, or the folder of another")
    add("--data-root", default="data", metavar="DIR", help="where datasets and word vectors are (default: data)")
    add("--make-split", action="store_true", help="divide own photos, in state_object/ or state/object/ folders or "
        "named in an images.csv (image,state,object); the first _ of state_object ends the state's name")
    add("--seed", type=int, default=0, help="of --make-split (default: 0)")
    add("--download", action="store_true", help="fetch the dataset first; what is there already stays")
    add("--vectors", nargs="+", default=[], choices=["word2vec", "fasttext", "glove"], metavar="NAME",
        help="with --download, also these word vectors: word2vec (1.5 GB), fasttext (4.2 GB), glove (0.8 GB)")
    options = parser.parse_args(argv)
    if options.vectors and not options.download:
        parser.error("--vectors goes with --download")
    if options.download:
        import download
        download.download(options.dataset, options.data_root, options.vectors)
    folder = locate(options.dataset, options.data_root)
    if options.make_split:
        make_split(folder, options.seed)
    dataset, problems = read(folder)
    problems += missing_files(dataset)
    report(dataset, problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
