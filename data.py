"""Compositions, splits and images of a dataset folder; `python data.py DATASET|FOLDER` says what is there and what is wrong.

Folders have the layout that this field's repositories share (`compositional-split-natural/*_pairs.txt`, a metadata `.t7`,
`images/`) or an `images.csv` with the columns image, state, object, split. N images, S states, O objects, C = S*O compositions,
P pairs; composition (s, o) = s*O + o. A set ("phase") is train, val or test.
"""

import argparse
import csv
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


class Dataset(NamedTuple):
    """What a folder holds, read by `load`. A composition is *seen* if it is a training pair (or has a training image)."""

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
        return seen.reshape(len(self.states), -1)

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
    """Read a dataset by its name (a folder of `root`) or by its folder: Dataset. Every obstacle at once: ValueError."""
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
    known = f"`python data.py {name} --download` fetches it" if name in FOLDERS else f"known names: {', '.join(FOLDERS)}"
    raise FileNotFoundError(f"no dataset {str(name)!r}: no folder {' or '.join(map(str, folders))}; {known}")


def read(folder):
    """As much of a folder as can be read: (Dataset, problems), problems a list of obstacles, empty if it is usable."""
    folder, notes, problems = Path(folder), [], []
    layout = read_table if (folder / "images.csv").exists() else read_published
    lists, rows = layout(folder, notes, problems)
    names = {part: sorted({pair[part] for pairs in lists.values() for pair in pairs}) for part in (0, 1)}
    states, objects = ({name: i for i, name in enumerate(names[part])} for part in (0, 1))
    code = {(s, o): states[s] * len(objects) + objects[o] for pairs in lists.values() for s, o in pairs}
    images, targets = members(rows, code, notes, problems)
    pairs = {phase: np.unique([code[pair] for pair in lists[phase]]).astype(np.int64) for phase in PHASES}
    pairs = {phase: np.stack(np.divmod(own, max(len(objects), 1)), 1) for phase, own in pairs.items()}
    name = {there: name for name, there in FOLDERS.items()}.get(folder.resolve().name, folder.resolve().name)
    feasible = read_feasible(folder, states, objects, problems)
    dataset = Dataset(name, folder, names[0], names[1], pairs, images, targets, feasible, notes)
    if not problems:
        notes += oddities(dataset)
    return dataset, problems


def read_published(folder, notes, problems):
    """The shared layout: (phase -> list of (state, object), rows of (image, state, object, set))."""
    where = folder / SPLIT if (folder / SPLIT).is_dir() else folder
    lists = {phase: read_pairs(where / f"{phase}_pairs.txt", notes, problems) for phase in PHASES}
    if (where / "all_pairs.txt").exists() and not all(lists.values()):
        lists["all"] = read_pairs(where / "all_pairs.txt", notes, problems)
    file = folder / f"metadata_{SPLIT}.t7"
    if not file.exists():
        problems.append(f"{file.name} is missing: which image shows what, in which set")
        return lists, []
    return lists, [tuple(str(row[key]) for key in ("image", "attr", "obj", "set")) for row in read_metadata(file)]


def read_pairs(file, notes, problems):
    """One `state object` a line: list of pairs, each once."""
    if not file.exists():
        problems.append(f"{file.name} is missing")
        return []
    lines = [line.split() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    for number, words in enumerate(lines, 1):
        if len(words) not in (0, 2):
            problems.append(f"{file.name} line {number} is {' '.join(words)!r}, expected `state object`")
    pairs = [tuple(words) for words in lines if len(words) == 2]
    if not pairs:
        problems.append(f"{file.name} lists no pair")
    if repeated := len(pairs) - len(set(pairs)):
        notes.append(f"{file.name} repeats {count(repeated, 'pair')}; each counts once")
    return list(dict.fromkeys(pairs))


def read_metadata(file):
    """The list of dicts `image, attr, obj, set` in a `.t7` file, read without running any code in it."""
    try:
        rows = torch.load(file, map_location="cpu", weights_only=True)
        missing = [i for i, row in enumerate(rows) if not {"image", "attr", "obj", "set"} <= row.keys()]
    except OSError:
        raise
    except Exception as error:  # torch, pickle and zip raise many types for a bad file
        raise ValueError(f"{file} is no metadata (torch.save of a list of dicts): {str(error).splitlines()[0]}") from None
    if missing:
        raise ValueError(f"{file}: row {missing[0]} lacks one of image, attr, obj, set; it has {', '.join(rows[missing[0]])}")
    return rows


def read_table(folder, notes, problems):
    """images.csv: (phase -> list of (state, object) as its rows show, rows of (image, state, object, set))."""
    rows = read_csv(folder / "images.csv")
    if "split" not in rows[0]:
        problems.append(f"images.csv has no column `split`: `python data.py {folder} --make-split` adds one")
    synonyms = {"training": "train", "validation": "val", "valid": "val", "testing": "test"}
    rows = [(row["image"], row["state"], row["object"], row.get("split", "NA")) for row in rows]
    rows = [(*row, synonyms.get(split.lower(), split.lower() if split != "NA" else split)) for *row, split in rows]
    wrong = [f"line {number} {row[3]!r}" for number, row in enumerate(rows, 2) if row[3] not in (*PHASES, "NA")]
    if wrong:
        problems.append(f"images.csv: split must be train, val or test: {some(wrong)}")
    shown = [row for row in rows if "NA" not in row]
    return {phase: list(dict.fromkeys(row[1:3] for row in shown if row[3] == phase)) for phase in PHASES}, rows


def read_csv(file):
    """Rows of an images.csv as dicts without stray blanks; `,`, `;` or tab between the columns."""
    with open(file, encoding="utf-8-sig", newline="") as lines:
        header = lines.readline()
        lines.seek(0)
        table = csv.DictReader(lines, delimiter=max(",;\t", key=header.count), restval="")
        rows = [{(key or "").strip().lower(): value.strip() for key, value in row.items() if key} for row in table]
    missing = [key for key in ("image", "state", "object") if not rows or key not in rows[0]]
    if missing:
        raise ValueError(f"{file}: no column {', '.join(missing)}; expected image,state,object,split, found {header.strip()!r}")
    empty = [f"line {number}" for number, row in enumerate(rows, 2) if not (row["image"] and row["state"] and row["object"])]
    if empty:
        raise ValueError(f"{file}: image, state or object is empty in {some(empty)}")
    return rows


def read_feasible(folder, states, objects, problems):
    """(S, O) bool from feasible_pairs.txt, None without that file."""
    file = folder / "feasible_pairs.txt"
    if not file.exists():
        return None
    feasible = np.zeros((len(states), len(objects)), bool)
    for state, thing in read_pairs(file, [], problems):
        if state in states and thing in objects:
            feasible[states[state], objects[thing]] = True
        else:
            problems.append(f"{file.name}: {state} {thing} names no state and object of this dataset")
    return feasible


def members(rows, code, notes, problems):
    """Rows into their sets, whose name alone decides: phase -> names, phase -> (N,) int64 compositions. Counts the skipped."""
    images, targets = ({phase: [] for phase in PHASES} for _ in range(2))
    skipped = Counter()
    for image, state, thing, phase in rows:
        if "NA" in (state, thing, phase):
            skipped["NA"] += 1
        elif (state, thing) not in code:
            skipped["a pair in no list"] += 1
        elif phase not in PHASES:
            skipped[f"a set {phase!r}"] += 1
        else:
            images[phase].append(image.replace("\\", "/").removeprefix("./"))
            targets[phase].append(code[state, thing])
    notes += [f"{count(number, 'row')} with {why} skipped" for why, number in skipped.items()]
    if rows and not any(images.values()):
        problems.append(f"none of the {len(rows):,} rows names a listed pair and a set; the first is {' '.join(rows[0])!r}")
    elif rows:
        problems += [f"no image belongs to the set {phase!r}" for phase in PHASES if not images[phase]]
    return images, {phase: np.array(own, np.int64) for phase, own in targets.items()}


def oddities(dataset):
    """Notes on what training never shows, with the accuracy ceilings that follow."""
    return []


def count(number, what):
    """`1 row`, `1,234 rows`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def some(names, most=5):
    """The first few of many names."""
    names = list(map(str, names))
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
