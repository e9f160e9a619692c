"""Compositions, splits and images of a dataset.

    python data.py DATASET|FOLDER                 # says what is there and what is wrong, decodes
                                                  # each photo that has no features yet
    python data.py FOLDER --make-split            # own photos in folders -> images.csv with a split

A folder has the layout that this field's repositories share
(`compositional-split-natural/*_pairs.txt`, a metadata `.t7`, `images/`),
or an `images.csv` with the columns image, state, object, split.

N images, S states, O objects, C = S*O compositions, P pairs, F numbers a feature;
composition (s, o) = s*O + o; a phase (train, val, test) is a set of images.
"""

import argparse
import csv
import io
import itertools
import os
import re
import shlex
import sys
import unicodedata
import warnings
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

import common

PHASES = "train", "val", "test"
FOLDERS = {"utzappos": "ut-zap50k", "mitstates": "mit-states", "cgqa": "cgqa", "shapes": "shapes"}
DRAWN = "shapes"  # the one of these that is drawn
DOWNLOADED = "utzappos", "mitstates", "cgqa"  # those that download.py fetches
SPLIT = "compositional-split-natural"
METADATA = f"metadata_{SPLIT}.t7"
METADATA_KEYS = "image", "attr", "obj", "set"
LAYOUT = f"""\
  {SPLIT}/   (train_pairs.txt, val_pairs.txt, test_pairs.txt)
  {METADATA}
  images/   (or features.npz)"""
OWN_LAYOUT = """\
  images.csv   (image,state,object,split)
  images/   (or features.npz)"""
FEATURES = "features.npz", "resnet18_featurers.t7"

# What people call the sets (in any case) and the columns of images.csv.
SYNONYMS = {"training": "train", "validation": "val", "valid": "val", "dev": "val",
            "testing": "test",
            "train": "train", "val": "val", "test": "test"}
COLUMNS = {"attr": "state", "obj": "object", "set": "split"}
REQUIRED = "image", "state", "object"
SAVED_STARTS = b"PK", b"\x80"  # of files that torch.save wrote, of now and of old
DIRECTORY = 0x10  # in the attributes of an archive's entry
# Threads that decode photos, at most. They share the interpreter, so that more are slower again
# (images a second on 32 cores: 519 with 1, 1,745 with 4, 1,995 with 8, 1,325 with 16).
DECODERS = 8

# Formats that Pillow registers but that hold no photo (drawings, films, measurements).
NO_PHOTOS = {"BUFR", "EPS", "FLI", "GRIB", "HDF5", "IPTC", "MPEG", "PALM", "PDF", "WMF"}
PLUGINS = {".heic": "pillow-heif", ".heif": "pillow-heif", ".hif": "pillow-heif",
           ".avif": "pillow-avif-plugin"}
NOT_WORTH_A_WORD = {"@eadir", "__macosx", "thumbs.db", "desktop.ini"}  # lower case
OWN_FILES = {"images.csv", "vectors.txt", "feasible_pairs.txt", "features.partial.npz", *FEATURES}

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
    skipped: frozenset = frozenset()  # images that only rows without a composition or a set name

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
    def every_image(self):
        """The images of all sets, each once, in the order of PHASES."""
        return list(dict.fromkeys(itertools.chain(*self.images.values())))

    def path(self, image):
        """Where an image lies: under `images/`, or (own data) beside images.csv.

        A disk may spell `é` as one character or as two (NFC, NFD), and each folder in its own way:
        all are looked for.
        """
        spellings = []
        for part in image.split("/"):
            spellings.append(dict.fromkeys((part, unicodedata.normalize("NFD", part))))
        for name in map("/".join, itertools.product(*spellings)):
            for folder in (self.folder / "images", self.folder):
                if (folder / name).exists():
                    return folder / name
        return self.folder / "images" / image


# ---- finding and reading a folder ----------------------------------------------------------------


def load(name, root="data"):
    """Read a dataset by its name (a folder of `root`) or by its folder: Dataset.

    ValueError names every obstacle at once, such as a set without images;
    FileNotFoundError: no such folder.
    """
    dataset, problems = read(locate(name, root))
    if problems:
        raise ValueError(f"{dataset.folder}: {'; '.join(problems)}")
    return dataset


def locate(name, root="data"):
    """The folder that `name` means: root/ut-zap50k for utzappos and so on (FOLDERS).

    Any other name is a folder, or else a folder of `root`. FileNotFoundError if it is not there.
    """
    if name in FOLDERS:
        folder = Path(root, FOLDERS[name])
        if folder.is_dir():
            return folder
        raise FileNotFoundError(no_named_folder(name, Path(root)))
    folders = dict.fromkeys((Path(name), Path(root, name)))
    for folder in folders:
        if folder.is_dir():
            return folder
        if folder.is_file():
            raise FileNotFoundError(f"{folder} is a file: name its folder, {folder.parent}")
    looked = " or ".join(map(str, folders))
    raise FileNotFoundError(
        f"no dataset {str(name)!r}: no folder {looked}; names: {', '.join(FOLDERS)}")


def no_named_folder(name, root):
    """What to say where a named dataset is not: what is missing, what to do, what is there."""
    folder = root / FOLDERS[name]
    absent = f"no dataset {name!r}: no folder {folder}"
    if name == DRAWN:
        return f"{absent}; `python drawings.py --out {shlex.quote(str(folder))}` draws it"
    layout = OWN_LAYOUT
    hint = "--data-root says in which folder it is"
    if name in DOWNLOADED:
        layout = LAYOUT
        hint = f"`python download.py {name}{data_root_option(root)}` fetches it"
    if root.name == FOLDERS[name] or (root / SPLIT).is_dir():
        hint = f"--data-root is the folder that holds {FOLDERS[name]}/: give {root.parent}"
    root = root.resolve()  # `.` has no name to show
    return (f"{absent}; {hint}\n"
            f"expected: {root / FOLDERS[name]}/\n{layout}\n"
            f"found: {listing(root)}")


def listing(folder):
    """What lies in a folder, on one line."""
    if not folder.is_dir():
        return f"{folder}: no such folder"
    names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in folder.iterdir()]
    return f"{folder}/: {some(sorted(names), 9) or '(empty)'}"


def data_root_option(root):
    """` --data-root DIR` where DIR is not the default."""
    return "" if str(root) == "data" else f" --data-root {shlex.quote(str(root))}"


def read(folder):
    """As much of a folder as can be read: (Dataset, problems); no problems if it is usable.

    `pairs` then has a fourth list, "all", where an all_pairs.txt stands in for missing ones.
    """
    folder = Path(folder)
    notes = []
    problems = []
    if (folder / "images.csv").exists():
        lists, rows = read_table(folder, notes, problems)
    else:
        lists, rows = read_published(folder, notes, problems)

    # The primitives are the words of the lists; a composition's index follows from their order.
    listed = [pair for pairs in lists.values() for pair in pairs]
    states = sorted({state for state, _ in listed})
    objects = sorted({object_ for _, object_ in listed})
    notes += look_alikes("states", states) + look_alikes("objects", objects)
    state_index = {state: s for s, state in enumerate(states)}
    object_index = {object_: o for o, object_ in enumerate(objects)}
    composition_index = {}
    for state, object_ in listed:
        index = state_index[state] * len(objects) + object_index[object_]
        composition_index[state, object_] = index

    pairs = {}
    for phase, names in lists.items():
        indices = np.array(sorted(composition_index[pair] for pair in names), np.int64)
        pairs[phase] = np.stack(np.divmod(indices, max(len(objects), 1)), 1)  # (P, 2)
    images, targets, skipped = members(rows, composition_index, notes, problems)
    feasible = read_feasible(folder, state_index, object_index, problems)
    name_of_folder = {its_folder: name for name, its_folder in FOLDERS.items()}
    name = folder.resolve().name
    dataset = Dataset(name_of_folder.get(name, name), folder, states, objects, pairs, images,
                      targets, feasible, notes, skipped)
    notes += oddities(dataset)
    return dataset, problems


def look_alikes(what, names):
    """Notes on names that people would call one."""
    alike = {}
    for name in names:
        key = re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", name)).casefold() or name
        alike.setdefault(key, []).append(name)
    notes = []
    for group in alike.values():
        if len(group) > 1:
            quoted = " and ".join(repr(name) for name in group)
            notes.append(f"the {what} {quoted} differ only in case, blanks, underscores or "
                         "signs: they count as different, spell them alike if they are one")
    return notes


def read_published(folder, notes, problems):
    """The shared layout: phase -> list of (state, object), and rows (image, state, object, set)."""
    split = folder / SPLIT if (folder / SPLIT).is_dir() else folder
    if not any(folder.glob("metadata*")) and not any(split.glob("*_pairs.txt")):
        problems.append(no_layout(folder))
        return {phase: [] for phase in PHASES}, []
    lists = {phase: read_pairs(split / f"{phase}_pairs.txt", notes, problems) for phase in PHASES}
    if not all(lists.values()) and (split / "all_pairs.txt").exists():
        lists["all"] = read_pairs(split / "all_pairs.txt", notes, problems)
    rows = read_metadata(find_metadata(folder, notes), problems)
    notes += cut_notes(split, lists, rows)
    return lists, rows


def cut_notes(split, lists, rows):
    """Notes on lists that seem cut off within their last name.

    Such a list has no line end, and its last name is the beginning of another and occurs once.
    """
    known = Counter(clean(row[2]) for row in rows)
    for pairs in lists.values():
        known.update(object_ for _, object_ in pairs)
    notes = []
    for phase in lists:
        file = split / f"{phase}_pairs.txt"
        text = read_text(file, problems=[])
        if not text[-1:].strip():  # a line end, or no text
            continue
        pair = parse_pair(text.splitlines()[-1])
        if len(pair) != 2:  # which is a problem
            continue
        last = pair[1]
        longer = [name for name in known if name.startswith(last) and name != last]
        if longer and known[last] == 1:
            notes.append(f"{file.name} ends without a line end in {last!r}, which nothing else "
                         f"names: if it is cut off (as of {some(longer)}), fetch it again")
    return notes


def no_layout(folder):
    """What to say of a folder that is no dataset, with the two layouts that would be one."""
    hint = "`python data.py FOLDER --make-split` makes an images.csv of own photos"
    for name, its_folder in FOLDERS.items():
        if (folder / its_folder / SPLIT).is_dir():
            hint = f"it holds {its_folder}/: name the dataset {name} and give --data-root {folder}"
    folder = folder.resolve()  # `.` has no name to show
    return (f"neither {SPLIT}/ nor images.csv; {hint}, "
            f"`python download.py NAME` fetches {', '.join(DOWNLOADED)}\n"
            f"expected: {folder}/\n{LAYOUT}\n"
            f"or, of own data: {folder}/\n{OWN_LAYOUT}\n"
            f"found: {listing(folder)}")


def find_metadata(folder, notes):
    """The metadata file: under its published name, or else the one `.t7` list there is."""
    published = folder / METADATA
    if published.exists():
        return published
    others = [file for file in sorted(folder.glob("*.t7")) if file.name not in FEATURES]
    lists = [file for file in others if read_metadata(file, problems=[])]
    if len(lists) == 1:
        notes.append(f"{lists[0].name} is taken as the metadata: there is no {METADATA}")
        return lists[0]
    if lists:
        found = some(file.name for file in lists)
        notes.append(f"the metadata may be {found}: give that one the name {METADATA}")
    return published


def read_pairs(file, notes, problems):
    """One `state object` a line (see `parse_pair`): list of pairs, each once."""
    pairs = []
    wrong = []
    for number, line in enumerate(read_text(file, problems).splitlines(), 1):
        pair = parse_pair(line)
        if len(pair) == 2:
            pairs.append(pair)
        elif pair:
            wrong.append(f"line {number} {' '.join(pair)!r}")
    if wrong:
        problems.append(f"{file.name}: expected `state object` a line (a tab or a comma between "
                        f"them where names hold blanks), found {some(wrong)}")
    unique = list(dict.fromkeys(pairs))
    repeated = len(pairs) - len(unique)
    if repeated:
        notes.append(f"{file.name} repeats {count(repeated, 'pair')}: each counts once")
    return unique


def parse_pair(line):
    """The names in a line, two if it is right: between tabs, else commas, else blanks.

    >>> parse_pair("wet dog"), parse_pair("dark red, garden hose"), parse_pair("dark red\\tcar")
    (('wet', 'dog'), ('dark red', 'garden hose'), ('dark red', 'car'))
    """
    line = line.strip()
    if "\t" in line:
        parts = line.split("\t")
    elif "," in line:
        parts = line.split(",")
    else:
        parts = line.split()
    names = [clean(part) for part in parts]
    return tuple(name for name in names if name)


def read_text(file, problems):
    """A text file, empty with a problem where it is missing, empty, no UTF-8 or damaged."""
    if not file.exists():
        problems.append(f"{file.name} is missing")
        return ""
    if not file.is_file():  # reading a named pipe would wait for ever
        problems.append(f"{file.name} is no plain file")
        return ""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        problems.append(f"{file.name}: {error}")
        return ""
    except UnicodeDecodeError:
        text = "\0"
    zeros = text.count("\0")
    if zeros > len(text) / 4:  # UTF-16 of plain letters decodes, with zeros between them
        kind = "CSV UTF-8" if file.suffix == ".csv" else "UTF-8"
        problems.append(f"{file.name} is not in UTF-8: save as {kind}")
        return ""
    if zeros:
        line = text[:text.index("\0")].count("\n") + 1
        problems.append(f"{file.name} is damaged: {count(zeros, 'zero byte')}, the first in line "
                        f"{line}, expected text; restore that line, or save the file anew")
        return ""
    if text.lstrip().lower().startswith(("<!", "<?", "<html")):
        problems.append(f"{file.name} is a web page, which a site may send in place of a file: "
                        "fetch it again")
        return ""
    if not text.strip():
        problems.append(f"{file.name} is empty")
    return text


def read_metadata(file, problems, keys=METADATA_KEYS):
    """Rows of texts, by default (image, state, object, set), from a `.t7` list of dicts.

    Runs no code in the file. What is wrong becomes a problem, and no rows.
    """
    if not file.exists():
        problems.append(f"{file.name} is missing: it says what each image shows and in which set "
                        "it is")
        return []
    rows = []
    try:
        stored = load_tensors(file)
        if not isinstance(stored, list):
            raise TypeError(f"found a {type(stored).__name__}")
        for row in stored:
            rows.append(tuple(as_text(row[key]) for key in keys))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        problems.append(f"{file.name} is no torch.save of a list of dicts with {', '.join(keys)} "
                        f"({type(error).__name__}: {error})")
        return []
    return rows


def as_text(value):
    """A name as text, whether Python's or NumPy's, text or bytes or number."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, (str, int, float, np.generic)):
        raise TypeError(f"found a {type(value).__name__}, expected a name")
    return str(value)


def read_table(folder, notes, problems):
    """images.csv: as `read_published`, the lists of pairs from its rows."""
    table = read_csv(folder / "images.csv", problems)
    if table and "split" not in table[0]:
        problems.append(f"images.csv has no column split: `python data.py "
                        f"{shlex.quote(str(folder))} --make-split` adds it")
        table = []
    rows = []
    wrong = []
    lists = {phase: {} for phase in PHASES}  # dicts as sets that keep the order
    for row in table:
        pair = row["state"], row["object"]
        phase = SYNONYMS.get(row["split"].lower(), row["split"])
        rows.append((row["image"], *pair, phase))
        if phase not in (*PHASES, "NA"):
            wrong.append(f"{row['image']} {phase!r}")
        elif "NA" not in (*pair, phase):
            lists[phase][pair] = True
    if wrong:
        problems.append(f"images.csv: split must be train, val or test, found {some(wrong)}")
    return lists, rows


def read_csv(file, problems):
    """Rows of a table of images as dicts {column in lower case: text without stray blanks}.

    `,`, `;`, `|` or tab between the columns, a first line `sep=;`, a title and empty rows as
    spreadsheets write them, and attr, obj, set for state, object, split. No rows, and a problem,
    if it is no such.
    """
    table = read_cells(file, problems)
    columns = []
    rows = []
    holes = []
    for number, cells in enumerate(table, 1):
        if not any(cell.strip() for cell in cells):
            continue
        if not set(REQUIRED) <= set(columns):  # a title may stand above the columns' names
            columns = column_names(cells)
            continue
        filled = itertools.zip_longest(columns, cells, fillvalue="")
        row = {column: cell.strip() for column, cell in filled if column}
        for primitive in ("state", "object"):
            row[primitive] = clean(row[primitive])
        rows.append(row)
        if not all(row[column] for column in REQUIRED):
            holes.append(number)
    twice = [name for name in (*REQUIRED, "split") if columns.count(name) > 1]
    if twice:
        problems.append(f"{file.name}: expected one column {some(twice)}, found "
                        f"{','.join(columns)!r}")
        return []
    if table and not rows:
        problems.append(f"{file.name}: expected image,state,object,split and rows of these, "
                        f"found {','.join(table[0])!r}")
    if holes:
        problems.append(f"{file.name}: image, state or object is empty in row {some(holes)}")
    return rows


def read_cells(file, problems):
    """The rows of a CSV file as lists of texts; none, and a problem, if it is broken.

    The most frequent separator of the first line that holds one counts, as of a line `sep=;`.
    """
    text = read_text(file, problems)
    first = next((line for line in text.splitlines() if re.search("[,;\t|]", line)), "")
    separator = max(",;\t|", key=first.count)
    # Not splitlines(): it cuts within quotes, and at more than line ends.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    try:
        return list(reader)
    except csv.Error as error:
        problems.append(f"{file.name} after line {reader.line_num - 1}: {error}")
        return []


def column_names(header):
    """The columns in lower case; attr, obj, set are state, object, split if these are not there."""
    columns = [name.strip().lower() for name in header]
    return [COLUMNS[name] if name in COLUMNS and COLUMNS[name] not in columns else name
            for name in columns]


def read_feasible(folder, state_index, object_index, problems):
    """(S, O) bool from feasible_pairs.txt (`state object` a line), None without that file."""
    file = folder / "feasible_pairs.txt"
    if not file.exists():
        return None
    feasible = np.zeros((len(state_index), len(object_index)), bool)
    unknown = 0
    for state, object_ in read_pairs(file, [], problems):
        if state in state_index and object_ in object_index:
            feasible[state_index[state], object_index[object_]] = True
        else:
            unknown += 1
    if unknown:
        problems.append(f"{file.name}: {count(unknown, 'pair')} of other states or objects")
    return feasible


def members(rows, composition_index, notes, problems):
    """Rows (image, state, object, set) to the sets they name; the set alone decides.

    Returns phase -> N names, phase -> (N,) int64 compositions, and the images that only skipped
    rows name; how many rows are skipped, and why, becomes a note.
    """
    images = {phase: [] for phase in PHASES}
    targets = {phase: [] for phase in PHASES}
    skipped_images = set()
    skipped = Counter()
    for image, state, object_, phase in rows:
        image = plain(image)
        pair = clean(state), clean(object_)
        phase = SYNONYMS.get(phase.lower(), phase)
        if "NA" in (*pair, phase):
            reason = "NA"
        elif pair not in composition_index:
            reason = "a pair in no list"
        elif phase not in PHASES:
            reason = f"the set {phase!r}"
        else:
            images[phase].append(image)
            targets[phase].append(composition_index[pair])
            continue
        skipped[reason] += 1
        skipped_images.add(image)
    for reason, number in skipped.items():
        notes.append(f"{count(number, 'row')} with {reason} skipped")

    if rows and not any(images.values()):
        problems.append(f"none of {count(len(rows), 'row')} names a listed pair and a set, "
                        f"the first is {rows[0]}")
    elif rows:
        for phase in PHASES:
            if not images[phase]:
                problems.append(f"no image is left in the set {phase!r}: train, val and test each "
                                "need some (--make-split makes them for own data without a split)")
    targets = {phase: np.array(indices, np.int64) for phase, indices in targets.items()}
    return images, targets, frozenset(skipped_images.difference(*images.values()))


# ---- what is odd but no obstacle -----------------------------------------------------------------


def oddities(dataset):
    """Notes on what training does not show and on what images cannot tell, with the ceilings.

    A ceiling is the accuracy that a model without a fault would reach.
    """
    if not all(len(target) for target in dataset.targets.values()):
        return []
    trained = np.zeros((len(dataset.states), len(dataset.objects)), bool)
    trained.flat[dataset.targets["train"]] = True
    notes = training_notes(dataset, trained)
    notes += primitive_notes(dataset, "state", dataset.states, trained.any(1))
    notes += primitive_notes(dataset, "object", dataset.objects, trained.any(0))
    for phase in PHASES[1:]:
        notes += world_notes(dataset, phase)
    for phase in PHASES:
        notes += repetition_notes(dataset, phase)
    phases_of_image = Counter()
    for phase in PHASES:
        phases_of_image.update(set(dataset.images[phase]))
    shared = sum(number > 1 for number in phases_of_image.values())
    if shared:
        notes.append(f"{count(shared, 'image')} in more than one set")
    return notes


def training_notes(dataset, trained):
    """Where the training list and what training images show, (S, O) bool, differ."""
    listed = np.zeros(trained.shape, bool)
    listed[tuple(dataset.pairs["train"].T)] = True
    notes = []
    without = (listed & ~trained).sum()
    if without:
        notes.append(f"{count(without, 'training pair')} without a training image, kept as seen")
    beyond = (trained & ~listed).sum()
    if beyond:
        notes.append(f"{count(beyond, 'composition')} with training images but not in the "
                     "training list, taken as seen")
    return notes


def primitive_notes(dataset, what, names, known):
    """States or objects that no training image shows; known: a bool for each name."""
    if known.all():
        return []
    ceilings = []
    for phase in PHASES[1:]:
        states, objects = np.divmod(dataset.targets[phase], len(dataset.objects))
        primitives = states if what == "state" else objects
        ceilings.append(f"{known[primitives].mean():.1%} of {phase}")
    unknown = [name for name, is_known in zip(names, known) if not is_known]
    return [f"{count(len(unknown), what)} without a training image ({some(unknown)}): "
            f"an accuracy ceiling of {' and '.join(ceilings)}"]


def world_notes(dataset, phase):
    """What a phase's closed world lacks, and whether it has seen and unseen compositions."""
    target = dataset.targets[phase]
    allowed = dataset.candidates(phase)[target]
    seen = dataset.seen.ravel()[target]
    notes = []
    outside = (~allowed).sum()
    if outside:
        notes.append(f"{count(outside, phase + ' image')} of pairs in neither the {phase} nor the "
                     f"training list: a ceiling of {allowed.mean():.1%} in the closed world")
    if seen.all():
        notes.append(f"no {phase} image shows an unseen composition: only the seen half can be "
                     "evaluated")
    if not seen.any():
        notes.append(f"no {phase} image shows a seen composition: only the unseen half can be "
                     "evaluated")
    return notes


def repetition_notes(dataset, phase):
    """Notes on images with several compositions in one set, and on rows that repeat one."""
    rows = Counter(zip(dataset.images[phase], dataset.targets[phase].tolist()))
    compositions = Counter(image for image, _ in rows)
    several = sum(number > 1 for number in compositions.values())
    notes = []
    if several:
        # The best that one answer an image can do: always its most frequent composition.
        most_frequent = Counter()
        for (image, _), number in rows.items():
            most_frequent[image] = max(most_frequent[image], number)
        ceiling = most_frequent.total() / rows.total()
        notes.append(f"{count(several, phase + ' image')} with more than one composition: "
                     f"an accuracy ceiling of {ceiling:.1%} of {phase}")
    again = rows.total() - len(rows)
    if again:
        notes.append(f"{count(again, phase + ' row')} repeating an image and its composition: "
                     "each row counts")
    return notes


def missing_files(dataset, features=None):
    """Problems with what features come from: a row in a feature file, or a photo, for each image.

    features: a file that alone has the features, as with `compcos.py --features`. As in training,
    a feature file in the folder counts alone, but the cache of an extraction only where the photos
    are gone: otherwise it is brought up to date from them.
    """
    images = dataset.every_image
    there = {image for image in images if dataset.path(image).exists()}
    folder = dataset.folder
    without_photo = missing(images, there, f"found in none of {folder}/images/, {folder}/, "
                            f"{', '.join(FEATURES)}")
    files = [features] if features else feature_files(dataset.folder)
    if not files:
        return without_photo
    try:
        stored = read_features(files[0], images)  # the first there is decides
    except (ValueError, OSError) as error:
        return [str(error)] if features else [str(error), *without_photo]
    wanted = set(images)
    wrong = [name for name in not_finite(stored["files"], stored["features"]) if name in wanted]
    problems = []
    if wrong:
        problems.append(f"{files[0]}: features of {count(len(wrong), 'image')} are not finite: "
                        f"{some(wrong)}")
    if "stamps" in stored and there and not features:
        return problems + without_photo
    where = f"not found in {files[0]}"
    if there and not features:
        where += ", which alone counts: without it, features are extracted from the photos"
    return problems + missing(images, set(stored["files"]), where)


def not_finite(names, features):
    """Those of N names whose features (N, F) are not finite as float32."""
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(features.astype(np.float32, copy=False)).all(1)
    return [names[row] for row in np.flatnonzero(~is_finite)]


def unreadable_images(dataset):
    """{image: why} of the photos that features are to be made of, and that cannot be read.

    Each is decoded, as for its features: a truncated one opens well. Those with features in the
    cache of an extraction have been, unless they changed since.
    """
    files = feature_files(dataset.folder)
    if files and not is_cache(files[0]):
        return {}
    have_been = decoded_images(dataset, files[0]) if files else set()
    paths = {image: dataset.path(image) for image in dataset.every_image if image not in have_been}
    return no_photos({image: path for image, path in paths.items() if path.exists()})


def no_photos(paths):
    """{name: why} of the files {name: path} that cannot be read as photos; progress on stderr."""
    register_plugins()
    unreadable = {}
    pool = ThreadPoolExecutor(DECODERS)
    try:
        with (pixel_limit() as limit,
              common.Progress("decoding", len(paths), "images") as progress):
            problems = pool.map(lambda path: no_photo(path, limit=limit), paths.values())
            for name, why in zip(paths, problems):
                if why:
                    unreadable[name] = why
                progress.update()
    finally:  # Ctrl-C does not wait for the rest
        pool.shutdown(cancel_futures=True)
    return unreadable


def decoded_images(dataset, cache):
    """The images with features in a cache that are as they were when these were made."""
    try:
        stored = read_features(cache)
    except (ValueError, OSError):  # `missing_files` says so
        return set()
    decoded = set()
    for image, its_stamp in zip(stored["files"], np.asarray(stored["stamps"]).tolist()):
        if stamp(dataset.path(image)) == tuple(its_stamp):
            decoded.add(image)
    return decoded


def stamp(path):
    """(size, time of change in ns) of a file, None where there is no file."""
    if not path.exists():
        return None
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def missing(images, found, where):
    """[a problem] that names the images that are not among the found; [] if all are."""
    lost = [image for image in images if image not in found]
    if not lost:
        return []
    return [f"{len(lost):,} of {count(len(images), 'image')} {where}: {some(lost)}"]


def look_through(image, content):
    """Decode an opened image to its end, a JPEG at a fraction of its size, which is faster."""
    image.draft("RGB", (256, 256))
    rgb(image)


def no_photo(path, use=look_through, limit=None):
    """Why a file cannot be read as a photo, None if it can and `use(image, content)` raised
    nothing; content: the file's bytes.

    limit: the most pixels, as `check_pixels` counts them; None: Pillow's own limit alone.
    """
    path = Path(path)
    try:
        if not path.exists():
            return "not there"
        if not path.is_file():
            return "no plain file"
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            check_pixels(image.size, limit)
            use(image, content)
    except Exception as error:  # decoders of broken files raise all sorts
        return unreadable_because(path, error)
    return None


@contextmanager
def pixel_limit(max_pixels=None):
    """The most pixels of an image, `max_pixels` or twice Pillow's own limit (None: no limit).

    Pillow warns of more than its limit and refuses more than twice of it. Here only what is over
    the limit is refused, so Pillow's is lifted for the time being, and its warnings, which name no
    file, are silent.
    """
    if max_pixels is not None and max_pixels < 1:
        raise ValueError(f"--max-pixels is {max_pixels}: expected 1 or more")
    pillows = Image.MAX_IMAGE_PIXELS
    limit = max_pixels
    if limit is None and pillows is not None:
        limit = 2 * pillows
    Image.MAX_IMAGE_PIXELS = limit
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")
            yield limit
    finally:
        Image.MAX_IMAGE_PIXELS = pillows


def rgb(image):
    """PIL's conversion, but of 16-bit greys their upper 8 bits, and floats in [0, 1] times 255.

    PIL alone would make white and black of these. ValueError: floats that are neither in [0, 1]
    nor up to 255.
    """
    if image.mode.startswith("I"):
        values = np.asarray(image) >> 8
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        values = np.asarray(image)
        low = values.min()
        high = values.max()
        if not high <= 255 or not np.isfinite(low):
            raise ValueError(f"floats from {low:g} to {high:g}, expected [0, 1] or [0, 255]")
        if 0 <= low and high <= 1:
            image = Image.fromarray((255 * values).round().astype(np.uint8))
    return image.convert("RGB")


def unreadable_because(path, error):
    """What to say of a file whose reading as a photo raised an exception."""
    if isinstance(error, UnidentifiedImageError):
        plugin = PLUGINS.get(Path(path).suffix.lower())
        if plugin:
            return f"not an image to Pillow as it is here: `pip install {plugin}`"
        return "not an image"
    if isinstance(error, Image.DecompressionBombError):
        return f"{error}; --max-pixels N lifts the limit"
    return str(error) or repr(error)


def check_pixels(size, limit):
    """ValueError for an image of more pixels than the limit (None: no limit).

    Those count that it has, or that it has once its short side is brought to 256: a strip grows.
    """
    width, height = size
    short, long = sorted(size)
    if limit and max(short, 256 * 256 / short) * long > limit:
        raise ValueError(f"{width:,} x {height:,} pixels, over the limit of {limit:,} at a short "
                         "side of 256 or more; a decompression bomb? --max-pixels N lifts the "
                         "limit")


def unnamed_photos(dataset):
    """Notes on photos in the folder that no row names."""
    folder = dataset.folder
    root = folder / "images" if (folder / "images").is_dir() else folder
    named = set(dataset.skipped).union(*dataset.images.values())
    above = f"{root.resolve().as_posix()}/"
    named |= {image.removeprefix("images/").removeprefix(above) for image in named}
    try:
        photos, _ = photo_files(root)
    except OSError as error:
        return [f"whether there are photos that no row names was not seen: {error}"]
    unnamed = [photo for photo in photos if plain(photo) not in named]
    if not unnamed:
        return []
    return [f"{count(len(unnamed), 'photo')} in {root} that no row names: {some(unnamed)}"]


# ---- feature files -------------------------------------------------------------------------------


def feature_files(folder):
    """The files of features in a folder, the one that counts first."""
    return [folder / name for name in FEATURES if (folder / name).exists()]


def is_cache(path):
    """Whether a file of features is one that extraction made here."""
    return path.is_file() and "stamps.npy" in archive_names(path)


def archive_names(path):
    """The names in a zip archive (.npz, torch.save); none of what is no such archive, or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except Exception:  # zip and struct raise many types; reading the file says what is wrong
        return []


def is_numpy_archive(path):
    """Whether a file is, or is meant as, one of `np.savez` and not of `torch.save`."""
    names = archive_names(path)
    if names:
        return any(name.endswith(".npy") for name in names)
    return Path(path).suffix == ".npz"


def load_tensors(path):
    """`torch.load` of plain data only: tensors, and NumPy arrays and scalars of numbers and texts.

    Runs no code in the file. OSError: it is not there or no plain file; ValueError: it holds
    something else, or is damaged.
    """
    check_archive(path)
    with open(path, "rb") as file:
        start = file.read(12)
    if start and not start.startswith(SAVED_STARTS):
        raise ValueError(f"{path}: no tensors by torch.save, it begins {start!r}")
    array = np.zeros(0).__reduce__()[0]
    scalar = np.float32(0).__reduce__()[0]
    kinds = "?", *np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "U", "S"
    allowed = [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in kinds}]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # as NumPy 1 and 2 call it
        allowed.append((array, f"{module}._reconstruct"))
        allowed.append((scalar, f"{module}.scalar"))
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # those of pickle and zip have no common class
        raise_if_unread(error)
        raise ValueError(f"{path}: no tensors by torch.save ({reason(error)})") from error


def check_archive(path):
    """Compare a zip archive (.npz, torch.save) with its own check sums; other files pass.

    torch.load does not compare them: a flipped bit would be other numbers without a word.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no file {path}")
    if not Path(path).is_file():
        raise OSError(f"{path} is no plain file")
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            for entry in archive.infolist():
                # torch.load takes what is marked so for empty, without a word
                if entry.external_attr & DIRECTORY and not entry.is_dir():
                    damaged = entry.filename
    except Exception as error:  # zip, zlib and struct raise many types for a bad file
        damaged = reason(error)
    if damaged:
        raise ValueError(f"{path} is damaged ({damaged}): make or fetch it again")


def raise_if_unread(error):
    """Raise again what is no fault of a file's content: a lack of memory, a file that is not read.

    An OSError without a file's name is such a fault: it is of a place beyond the file's end.
    """
    if isinstance(error, MemoryError) or isinstance(error, OSError) and error.filename is not None:
        raise error


def reason(error):
    """What an exception says, without the advice of NumPy and torch to load unsafely."""
    text = " ".join(str(error).split())
    if "allow_pickle" in text or "weights_only" in text:
        return ("Object arrays or other Python objects: only plain data are loaded, names as by "
                "np.array(names, str)")
    return f"{type(error).__name__}: {text[:100]}"


def read_features(path, wanted=()):
    """The dict in a .npz or torch.save file, with `files` a list and `features` an array (N, F).

    Whatever the name's ending, the content decides which of the two it is.
    wanted: names of images; a leading folder that only the file writes (`images/`, an absolute
    path) is then removed from its names. ValueError says what is not as expected.
    """
    check_archive(path)
    if is_numpy_archive(path):
        try:
            with np.load(path, allow_pickle=False) as archive:
                stored = dict(archive)
        except Exception as error:  # of zip, pickle and NumPy
            raise_if_unread(error)
            raise ValueError(f"{path}: not a NumPy .npz archive of plain arrays "
                             f"({reason(error)})") from error
    else:
        stored = load_tensors(path)
    if not isinstance(stored, dict) or not {"files", "features"} <= set(stored):
        holds = f"a {type(stored).__name__}"
        if isinstance(stored, dict):
            holds = ", ".join(map(str, stored))[:200]
        raise ValueError(f"{path}: holds {holds}; expected `files` (N names) and `features` (N, F)")

    try:
        files = [plain(as_text(name)) for name in stored["files"]]
    except (TypeError, UnicodeDecodeError):
        raise ValueError(f"{path}: `files` is a {type(stored['files']).__name__}, expected N "
                         "names in UTF-8") from None
    files = without_prefix(files, wanted)
    features = as_array(stored["features"])
    if features.ndim != 2 or len(features) != len(files) or features.dtype.kind not in "fiu":
        raise ValueError(f"{path}: {count(len(files), 'file')} and features {features.shape} "
                         f"{features.dtype}, expected (N, F) numbers for N files")
    if files and features.shape[1] == 0:
        raise ValueError(f"{path}: features of 0 numbers, expected 1 or more each")
    check_repeated(path, files, features)
    return {**stored, "files": files, "features": features}


def as_array(features):
    """An array of what was stored: a tensor of any type, with or without a gradient, or an array.
    """
    if not torch.is_tensor(features):
        return np.asarray(features)
    features = features.detach().to_dense()  # which changes sparse ones alone
    if features.dtype == torch.bfloat16:  # NumPy has no such type
        features = features.float()
    return features.numpy()


def without_prefix(files, wanted):
    """The names without the one leading folder that leaves most of them among the wanted."""
    wanted = set(wanted)
    prefixes = Counter()
    for name in files:
        for slash in re.finditer("/", name):
            if name[slash.end():] in wanted:
                prefixes[name[:slash.end()]] += 1
    if not prefixes:
        return files
    prefix, matching = prefixes.most_common(1)[0]
    if matching <= len(wanted.intersection(files)):
        return files
    return [name.removeprefix(prefix) for name in files]


def check_repeated(path, files, features):
    """ValueError if a name has several rows that differ."""
    last = dict(zip(files, features))
    if len(last) == len(files):
        return
    differ = {name for name, row in zip(files, features) if (row != last[name]).any()}
    if differ:
        raise ValueError(f"{path}: several rows that differ for {some(sorted(differ))}; "
                         "expected one for each name")


# ---- own photos ----------------------------------------------------------------------------------


def make_split(folder, seed=0, share=COMPOSITION_SHARE):
    """Write images.csv with a split, from an images.csv without one or from photos in folders.

    share: of the compositions, see `divide`. ValueError: a split is there, or none can be made.
    """
    folder = Path(folder)
    file = folder / "images.csv"
    problems = []
    if file.exists():
        rows = read_csv(file, problems)
    else:
        rows = read_photos(folder)
    if problems:
        raise ValueError("; ".join(problems))
    if any(row.get("split") for row in rows):
        raise ValueError(f"{file} has a split: remove that column (or the file, for photos in "
                         "folders) to make another")
    times = Counter(row["image"] for row in rows)
    again = [image for image, number in times.items() if number > 1]
    if again:
        raise ValueError(f"{file}: an image shows one composition, but these are listed again: "
                         f"{some(again)}")
    pairs = [(row["state"], row["object"]) for row in rows]
    split = divide(pairs, seed, share)
    columns = list(dict.fromkeys([*rows[0], "split"]))
    with common.writing(file) as out:
        table = csv.DictWriter(out, columns, lineterminator="\n")
        table.writeheader()
        for row, phase in zip(rows, split):
            table.writerow(row | {"split": phase})
    print(f"wrote {file} (seed {seed}, share {share:g})")


def read_photos(folder):
    """Rows from photos in `state_object/` or `state/object/` folders, in FOLDER/images or FOLDER.

    In `state_object` the longest run of `_`, of equals the first, ends the state's name.
    """
    root = folder / "images" if (folder / "images").is_dir() else folder
    photos, left_out = photo_files(root)
    rows = []
    astray = []
    doubtful = {}
    for photo in photos:
        *parents, _ = photo.split("/")
        names = tuple(parents)
        if len(parents) == 1:
            names, is_doubtful = split_folder_name(parents[0])
            if is_doubtful:
                doubtful[parents[0]] = True
        names = [clean(name) for name in names]
        if len(names) == 2 and all(names):
            rows.append({"image": photo, "state": names[0], "object": names[1]})
        else:
            astray.append(photo)
    if left_out:
        print(f"note: {what_stayed_out(photos, left_out)}")
    if root != folder:
        beside = [photo for photo in photo_files(folder)[0] if not photo.startswith("images/")]
        if beside:
            print(f"note: beside images/, which alone counts, {count(len(beside), 'photo')}: "
                  f"{some(beside)}")
    if astray or not rows:
        found = "no photo"
        if astray:
            found = f"{count(len(astray), 'photo')} elsewhere: {some(astray)}"
        raise ValueError(f"{root}: expected photos in state_object/ or state/object/ folders, "
                         f"found {found}")
    sets = sorted({row["state"] for row in rows if row["state"].lower() in SYNONYMS})
    if sets:
        print(f"note: {some(sets)} are read as states; if they are sets, write an images.csv "
              "with image,state,object,split instead")
    if doubtful:
        print(f"note: the first _ ends the state's name in {some(doubtful)}; state/object/ "
              "folders are exact")
    return rows


def split_folder_name(name):
    """(names, doubtful): state and object of a folder, whether another `_` could as well end one.

    >>> split_folder_name("wet_dog"), split_folder_name("Corn_(maize)___healthy")
    ((('wet', 'dog'), False), (('Corn_(maize)', 'healthy'), False))
    >>> split_folder_name("dark_blue_car")
    (('dark', 'blue_car'), True)
    """
    name = name.strip("_ ")
    runs = re.findall("_+", name)
    if not runs:
        return (name,), False
    longest = max(runs, key=len)
    state, _, object_ = name.partition(longest)
    return (state, object_), runs.count(longest) > 1


def register_plugins():
    """Let Pillow open HEIC and AVIF photos by pillow_heif and pillow_avif, where installed."""
    try:
        import pillow_heif
        pillow_heif.register_heif_opener()
    except ImportError:
        pass
    try:
        import pillow_avif  # noqa: F401 (registers itself)
    except ImportError:
        pass


def photo_suffixes():
    """The suffixes, in lower case, of the photos that Pillow opens here, plugins included."""
    register_plugins()
    Image.init()
    openable = set(Image.OPEN) | {"MPO"}  # JPEG's plugin opens MPO
    openable -= NO_PHOTOS
    return {suffix.lower() for suffix, name in Image.registered_extensions().items()
            if name in openable}


def photo_files(root):
    """(photos, left out): names of files below `root`, `/` between folders, sorted.

    Links to folders are followed, once around a circle. Hidden files and what systems leave behind
    (Thumbs.db, @eaDir) are in neither list. OSError: a folder that may not be looked into.
    """
    def stop(error):
        raise error

    suffixes = photo_suffixes()
    photos = []
    left_out = []
    for folder, subfolders, files in os.walk(root, onerror=stop, followlinks=True):
        subfolders[:] = [name for name in subfolders if is_worth_a_word(name)
                         and not is_circle(folder, os.path.join(folder, name))]
        for name in files:
            path = Path(folder, name)
            place = path.relative_to(root).as_posix()
            if not is_worth_a_word(name) or place in OWN_FILES:
                continue
            if path.suffix.lower() in suffixes and path.exists():
                photos.append(place)
            else:
                left_out.append(place)
    return sorted(photos), sorted(left_out)


def is_worth_a_word(name):
    """Whether a file or folder could be meant as data."""
    return not name.startswith(".") and name.lower() not in NOT_WORTH_A_WORD


def is_circle(folder, subfolder):
    """Whether a subfolder is a link to a folder that it lies in."""
    return Path(folder).resolve().is_relative_to(Path(subfolder).resolve())


def what_stayed_out(photos, left_out):
    """How many files of which suffix are no photos here, which folders lose all, what to do."""
    suffixes = Counter()
    for name in left_out:
        suffixes[Path(name).suffix.lower() or "without suffix"] += 1
    counted = [f"{number:,} {suffix}" for suffix, number in suffixes.most_common()]
    text = (f"{count(len(left_out), 'file')} left out, which Pillow does not open as photos here: "
            f"{some(counted, 20)}")
    if photo_suffixes() & suffixes.keys():
        text += " (photos among these are links to nothing)"
    kept = set()  # folders with a photo somewhere below them
    for name in photos:
        kept.update(str(parent) for parent in PurePosixPath(name).parents)
    emptied = {os.path.dirname(name) for name in left_out} - kept - {""}
    if emptied:
        text += f"; nothing is left of {some(sorted(emptied))}"
    plugins = sorted({PLUGINS[suffix] for suffix in suffixes if suffix in PLUGINS})
    if plugins:
        text += f"; `pip install {' '.join(plugins)}`, or save them as JPEG or PNG"
    else:
        text += "; save photos among them as JPEG or PNG"
    return text


def divide(pairs, seed=0, share=COMPOSITION_SHARE, image_share=IMAGE_SHARE):
    """A set for each of N images from its (state, object): list of N of "train", "val", "test".

    `share` of the compositions become val's unseen ones and as many test's, while every state and
    object keeps a training composition; of the others' images `image_share` go to val and as many
    to test, and each composition keeps one. ValueError: too few for three sets, or a bad share.
    """
    if not 0 < share < 0.5:
        raise ValueError(f"a share of {share}: expected more than 0 and less than 0.5, since val "
                         "and test get as many compositions each")
    if seed < 0:
        raise ValueError(f"a seed of {seed}: expected 0 or more")
    random = np.random.default_rng(seed)
    images_of = {}
    for image, pair in enumerate(pairs):
        images_of.setdefault(pair, []).append(image)
    compositions = sorted(images_of)
    unseen = choose_unseen(compositions, share, random)
    split = [unseen.get(pair, "train") for pair in pairs]

    # Of each seen composition all images but one may leave training.
    spare = []
    for pair in compositions:
        if pair not in unseen:
            spare += random.permutation(images_of[pair])[1:].tolist()
    spare = random.permutation(spare).astype(int)
    wanted = max(1, round(image_share * split.count("train")))
    each = min(wanted, len(spare) // 2)
    for place, image in enumerate(spare[:2 * each]):
        split[image] = "test" if place % 2 == 0 else "val"
    if set(split) != set(PHASES):
        raise ValueError(f"{count(len(pairs), 'image')} of {count(len(images_of), 'composition')}: "
                         "too few for three sets")
    return split


def choose_unseen(compositions, share, random):
    """{(state, object): "val" or "test"}: `share` of the compositions each, or as many as can be.

    Every state and object stays in a composition that is not chosen.
    """
    states = Counter(state for state, _ in compositions)
    objects = Counter(object_ for _, object_ in compositions)
    wanted = 2 * max(1, round(share * len(compositions)))
    unseen = {}
    for place in random.permutation(len(compositions)):
        state, object_ = compositions[place]
        if len(unseen) < wanted and states[state] > 1 and objects[object_] > 1:
            unseen[state, object_] = "test" if len(unseen) % 2 == 0 else "val"
            states[state] -= 1
            objects[object_] -= 1
    return unseen


# ---- words ---------------------------------------------------------------------------------------


def plain(image):
    """An image's name with `/` between folders, no `./` before, and `é` one character (NFC)."""
    return unicodedata.normalize("NFC", image.replace("\\", "/").removeprefix("./"))


def clean(name):
    """A state's or object's name without blanks around it, one blank within, `é` one character."""
    return re.sub("[ \t\xa0]+", " ", unicodedata.normalize("NFC", name)).strip()


def count(number, what):
    """`1 row`, `1,234 rows`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def some(names, most=5):
    """The first few of many names, and how many more."""
    names = list(map(str, names))
    text = ", ".join(printable(name) for name in names[:most])
    if len(names) > most:
        text += f" and {len(names) - most:,} more"
    return text


def some_with_reasons(reasons, most=5):
    """The first few of {name: why}, and how many more."""
    return some([f"{name} ({why})" for name, why in reasons.items()], most)


def printable(text):
    """Text on one line, without what could steer a terminal."""
    return common.printable(text).replace("\n", "\\n")


# ---- the command line ----------------------------------------------------------------------------


def report(dataset, problems):
    """Print the counts that papers give, the notes, and the problems."""
    if dataset.states:
        print_counts(dataset)
    for note in dataset.notes:
        print(f"note: {printable(note)}")
    for problem in problems:
        print("problem:", common.printable(problem))


def print_counts(dataset):
    """The table of compositions and images, seen and unseen."""
    seen = dataset.seen  # (S, O)
    listed = {tuple(pair) for pairs in dataset.pairs.values() for pair in pairs.tolist()}
    print(f"{dataset.name}: {count(len(dataset.states), 'state')}, "
          f"{count(len(dataset.objects), 'object')}, {count(seen.size, 'composition')}; "
          f"{len(listed):,} listed, {seen.size - len(listed):,} in no list")
    print(f"{'':12}{'seen':>8}{'unseen':>8}{'images':>10}{'of seen':>10}{'of unseen':>10}")
    for phase in PHASES:
        pairs = seen[tuple(dataset.pairs[phase].T)]  # (P,)
        images = seen.ravel()[dataset.targets[phase]]  # (N,)
        print(f"{phase:12}{pairs.sum():8,}{(~pairs).sum():8,}"
              f"{len(images):10,}{images.sum():10,}{(~images).sum():10,}")


def next_command(dataset, name, root, features=None, options=""):
    """The command that trains on it, with random word vectors where there are none."""
    command = f"python compcos.py --dataset {shlex.quote(name)}{data_root_option(root)}"
    if features:
        command += f" --features {shlex.quote(features)}"
    command += options
    needed = ["w2v"] if dataset.name in ("utzappos", "cgqa") else ["w2v", "fast"]
    has_all = all(Path(root, folder).exists() for folder in needed)
    if has_all or (dataset.folder / "vectors.txt").exists():
        return command
    return (f"{command} --vectors random"
            "   # better: a file of word vectors, or glove, word2vec, fasttext (see download.py)")


def parse(argv):
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("dataset", metavar="DATASET|FOLDER",
        help=f"{', '.join(FOLDERS)}, or the folder of another")
    add("--data-root", default="data", metavar="DIR",
        help="where datasets and word vectors are (default: data)")
    add("--features", metavar="FILE",
        help="the file with the images' features that compcos.py will be given")
    add("--make-split", action="store_true",
        help="divide own photos, in state_object/ or state/object/ folders or named in an "
             "images.csv (image,state,object); the longest run of _, of equals the first, in "
             "state_object ends the state's name")
    add("--share", type=float,
        help="of --make-split: the share of compositions that are unseen in val, and in test "
             f"(default: {COMPOSITION_SHARE})")
    add("--seed", type=int, help="of --make-split (default: 0)")
    options = parser.parse_args(argv)
    if not options.make_split and (options.share, options.seed) != (None, None):
        parser.error("--share and --seed are of --make-split, which is not given")
    if options.share is None:
        options.share = COMPOSITION_SHARE
    options.seed = options.seed or 0
    return options


@common.command
def main(argv=None):
    """Check a dataset, after making its split if asked: exit status 1 if it cannot be used."""
    options = parse(argv)
    folder = locate(options.dataset, options.data_root)
    if options.make_split:
        make_split(folder, options.seed, options.share)
    dataset, problems = read(folder)
    more = ""
    if dataset.states:  # else there is nothing that could lack files
        problems += missing_files(dataset, options.features)
        dataset.notes.extend(unnamed_photos(dataset))
        unreadable = {} if options.features else unreadable_images(dataset)
        if unreadable:
            more = " --skip-broken"
            dataset.notes.append(f"{count(len(unreadable), 'image')} that cannot be read, which "
                                 f"--skip-broken leaves out: {some_with_reasons(unreadable)}")
            for phase in PHASES:
                if dataset.images[phase] and unreadable.keys() >= set(dataset.images[phase]):
                    problems.append(f"no image of the set {phase!r} can be read")
    report(dataset, problems)
    if problems:
        return 1
    command = next_command(dataset, options.dataset, options.data_root, options.features, more)
    print(f"next: {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
