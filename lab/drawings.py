"""The built-in dataset: 64 x 64 pictures of toys, plants and vessels, in states that suit some.

    drawings.ensure("data/shapes")    # what `python compcos.py` does on its own

15 objects in three families and 15 states: four of each family (a vessel is full, a toy striped)
and three colours that suit all. So 105 of the 225 compositions are feasible, which is known, and
the others are never drawn. Pictures vary in place, size, turn, shade, background and noise; states
of different families look alike (a hollow toy, an empty vessel), so that infeasible compositions
distract. The folder has the layout of own data (images.csv, images/), with feasible_pairs.txt for
the truth, features.npz (small pixels) and vectors.txt: family similarity as noisy as in word
vectors, and nothing about which pairs are feasible.
"""

import itertools
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from lab import shell
from lab.files import write_rows

SIZE = 64    # pixels a side of the picture
DRAWN = 128  # pixels a side of the canvas that is scaled down to it
IMAGES = dict(train=40, seen=6, unseen=25)  # of a composition: in training; in each of val and test
OBJECTS = {"toy": ("cross", "disc", "square", "star", "triangle"),
           "plant": ("cactus", "flower", "leaf", "mushroom", "tree"),
           "vessel": ("bottle", "bowl", "cup", "goblet", "jar")}
STATES = {"toy": ("dotted", "halved", "hollow", "striped"),
          "plant": ("budding", "burnt", "frosted", "wilted"),
          "vessel": ("broken", "empty", "full", "tipped"),
          "any": ("blue", "green", "red")}
FEATURE = "16 x 16 pixels, standardised"  # the simple feature that serves this dataset
COLOURS = {"blue": (40, 70, 220), "green": (30, 170, 60), "red": (215, 40, 40)}
PLAIN = ((190, 150, 40), (150, 70, 170), (60, 170, 180), (150, 110, 80))  # of no colour state
GRADIENT = Image.linear_gradient("L").resize((DRAWN, DRAWN))  # of the light in the background
VECTOR_SIZE = 100
# Of the height of what is drawn, from the top, where the content of a vessel, frost or fire ends.
LEVELS = {"hollow": (.35, .5), "empty": (.35, .5), "full": (.35, .5),
          "frosted": (.4, .6), "burnt": (.4, .6)}
LEAST_SHARE = 0.05  # of the squared length of a vector, the share that is its family's
MOST_SHARE = 0.5


def ring(n, radius=1.0):
    """A regular polygon as points (n, 2) in [-1, 1], the first one at the top."""
    angles = 2 * np.pi * np.arange(n) / n - np.pi / 2
    return radius * np.stack([np.cos(angles), np.sin(angles)], 1)


def box(left, top, right, bottom):
    """A rectangle as points (4, 2)."""
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], float)


def outlines():
    """The polygons of each object, x to the right and y down in [-1, 1]."""
    lower_half = ring(32)[8:25]  # of a disc
    petals = []
    for angle in np.arange(5) * 1.2566:
        centre = .42 * np.cos(angle), .42 * np.sin(angle) - .4
        petals.append(ring(12, .33) + centre)
    blade = np.array([[0, -1], [.6, -.3], [.45, .4], [0, .7], [-.45, .4], [-.6, -.3]])
    crown = np.array([[0, -1], [.8, .3], [-.8, .3]])
    spikes = np.resize([[1], [.42]], (10, 1))  # every other point lies further in
    chalice = np.array([[-.8, -1], [.8, -1], [.12, .2], [-.12, .2]])
    return {
        "cross": [box(-.3, -1, .3, 1), box(-1, -.3, 1, .3)],
        "disc": [ring(32)],
        "square": [box(-.8, -.8, .8, .8)],
        "star": [ring(10) * spikes],
        "triangle": [ring(3, 1.1)],
        "cactus": [box(-.25, -1, .25, 1), box(-.8, -.5, -.55, .2), box(-.8, .1, 0, .3),
                   box(.55, -.2, .8, .5), box(0, .35, .8, .55)],
        "flower": [*petals, box(-.08, 0, .08, 1)],
        "leaf": [blade, box(-.06, .6, .06, 1)],
        "mushroom": [lower_half * [1, -.9], box(-.28, 0, .28, 1)],
        "tree": [crown, box(-.18, .3, .18, 1)],
        "bottle": [box(-.45, -.2, .45, 1), box(-.17, -1, .17, -.1)],
        "bowl": [lower_half * [1, .9]],
        "cup": [box(-.7, -.7, .45, .8), box(.45, -.4, .95, -.2), box(.75, -.4, .95, .4),
                box(.45, .2, .95, .4)],
        "goblet": [chalice, box(-.1, .1, .1, .9), box(-.5, .85, .5, 1)],
        "jar": [box(-.7, -.6, .7, 1), box(-.5, -1, .5, -.75)],
    }


OUTLINES = outlines()


def silhouette(object_, state, random):
    """The object as a mask ("L"), and its unit of length in pixels of the canvas."""
    unit = random.uniform(.26, .38) * DRAWN
    centre = DRAWN / 2 + random.uniform(-.1, .1, 2) * DRAWN
    angle = random.uniform(-.2, .2)
    if state == "tipped":
        angle += random.choice([-1, 1]) * np.pi / 2
    rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    mask = Image.new("L", (DRAWN, DRAWN))
    for polygon in OUTLINES[object_]:
        if state == "wilted":  # the higher, the more it hangs to one side
            x = polygon[:, 0] + .35 * (1 - polygon[:, 1]) ** 2 * .6
            y = .3 + .7 * polygon[:, 1]
            polygon = np.stack([x, y], 1)
        points = polygon @ rotation * unit + centre
        ImageDraw.Draw(mask).polygon(points.ravel().tolist(), fill=255)
    return mask, unit


def pattern(state, mask, unit, random):
    """Two masks ("L"): where the object has its colour, where it has the accent of its state."""
    accent = Image.new("L", mask.size)
    pencil = ImageDraw.Draw(accent)
    left, top, right, bottom = mask.getbbox()
    shift = random.uniform(0, .4) * unit  # where stripes and dots begin
    step = .42 * unit
    level = top
    # Some states use no shift or no level. They are drawn all the same: without them the numbers
    # that follow, and so all pictures, would be others.
    if state in LEVELS:
        level += (bottom - top) * random.uniform(*LEVELS[state])
    below = [0, level, DRAWN, DRAWN]
    areas = {"full": below, "burnt": below, "frosted": [0, 0, DRAWN, level],
             "halved": [0, 0, (left + right) / 2, DRAWN]}

    body = mask
    if state in areas:
        pencil.rectangle(areas[state], fill=255)
    if state in ("hollow", "empty", "full"):  # only what lies near the edge
        blurred = mask.filter(ImageFilter.BoxBlur(2 + unit / 14))
        inside = blurred.point([0] * 250 + [255] * 6)
        body = ImageChops.subtract(mask, inside)
    elif state == "striped":  # diagonals, half as wide as they are apart
        for x in np.arange(-DRAWN + shift, DRAWN, step):
            pencil.line([(x, 0), (x + DRAWN, DRAWN)], fill=255, width=int(step / 2))
    elif state in ("dotted", "budding"):  # a grid; of buds, half of it
        radius = step / 4
        for y in np.arange(shift, DRAWN, step):
            for x in np.arange(shift, DRAWN, step):
                if state == "dotted" or random.random() < .5:
                    pencil.ellipse([x - radius, y - radius, x + radius, y + radius], fill=255)
    elif state == "broken":  # a zigzag across the middle
        x = np.linspace(left - 2, right + 2, 7)
        y = (top + bottom) / 2 + np.resize([.18, -.18], 7) * unit
        pencil.line(list(zip(x, y)), fill=255, width=int(.22 * unit))
    return body, ImageChops.multiply(accent, mask)


def draw(state, object_, random):
    """One picture (RGB, 64 x 64) of an object in a state; `random` a NumPy generator."""
    mask, unit = silhouette(object_, state, random)
    body, accent = pattern(state, mask, unit, random)
    shade = random.uniform(.75, 1.15)
    colour = np.array(COLOURS[state]) if state in COLOURS else random.choice(PLAIN)
    colour = colour * shade + random.normal(0, 12, 3)
    light = random.uniform(170, 235) + random.normal(0, 10, 3)
    accents = {"burnt": (35, 25, 20), "frosted": (245, 250, 255), "budding": (240, 130, 180),
               "full": np.array([120, 160, 210]) * shade,
               "broken": light}  # through a crack shows the background

    picture = Image.new("RGB", mask.size, _rgb(light))
    dark = Image.new("RGB", mask.size, _rgb(light * .75))
    picture.paste(dark, mask=GRADIENT.rotate(90 * random.integers(4)))
    picture.paste(_rgb(colour), mask=body)
    picture.paste(_rgb(accents.get(state, colour * .35)), mask=accent)
    noise = 8 * random.standard_normal((SIZE, SIZE, 3), np.float32)
    noisy = np.array(picture.reduce(DRAWN // SIZE), np.float32) + noise
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def _rgb(colour):
    """Three numbers as a colour of Pillow's."""
    return tuple(np.clip(colour, 0, 255).astype(int).tolist())


def feature(picture):
    """(768,) float32: 16 x 16 pixels of the picture, brought to mean 0 and deviation 1."""
    small = np.array(picture.resize((16, 16), Image.Resampling.BOX), np.float32).ravel()
    return (small - small.mean()) / max(small.std(), 1)


def compositions(random):
    """{(state, object): "train", "val" or "test"} of the 105 feasible ones.

    A fifth is unseen in val and a fifth in test; every state and object has two others in training.
    """
    feasible = []
    for family, objects in OBJECTS.items():
        feasible += itertools.product(STATES[family] + STATES["any"], objects)
    feasible.sort()
    fifth = len(feasible) // 5
    wanted = ["val"] * fifth + ["test"] * fifth
    split = dict.fromkeys(feasible, "train")
    in_training = Counter(itertools.chain(*feasible))  # compositions of a state or object
    for place in random.permutation(len(feasible)):
        pair = feasible[place]
        if wanted and min(in_training[name] for name in pair) > 2:
            split[pair] = wanted.pop()
            in_training.subtract(pair)
    return split


def vectors(random):
    """{name: (100,)}: noise of its own and a share of its family's direction.

    Families of states and of objects are unrelated.
    """
    table = {}
    for names in (*STATES.values(), *OBJECTS.values()):
        family = random.normal(size=VECTOR_SIZE)
        for name in names:
            share = random.uniform(LEAST_SHARE, MOST_SHARE)
            noise = random.normal(size=VECTOR_SIZE)
            vector = share ** .5 * family + (1 - share) ** .5 * noise
            table[name] = vector / VECTOR_SIZE ** .5
    return table


def ensure(folder):
    """Draw the dataset into a folder, unless that is there; it appears only once it is whole.

    Of two processes that do so at once one wins, and both go on.
    """
    folder = Path(folder)
    if folder.exists():
        return
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        (part / "images").mkdir(parents=True)
        fill(part)
        os.rename(part, folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def fill(folder):
    """Draw the dataset into an empty folder that has an `images/`."""
    random = np.random.default_rng(0)
    split = compositions(random)
    jobs = []
    for (state, object_), own_phase in split.items():
        numbers = {own_phase: IMAGES["unseen"]}
        if own_phase == "train":
            numbers = {"train": IMAGES["train"], "val": IMAGES["seen"], "test": IMAGES["seen"]}
        for phase, number in numbers.items():
            jobs += [(state, object_, phase)] * number
    rows = []
    features = []
    with shell.Progress("drawing shapes", len(jobs), "images") as progress:
        for number, (state, object_, phase) in enumerate(jobs):
            image = f"{state}_{object_}_{number:04d}.png"
            picture = draw(state, object_, random)
            picture.save(folder / "images" / image, compress_level=1)
            rows.append((image, state, object_, phase))
            features.append(feature(picture))
            progress.update()
    write_rows(folder / "images.csv", ("image", "state", "object", "split"), rows)
    pairs = [f"{state} {object_}\n" for state, object_ in split]
    (folder / "feasible_pairs.txt").write_text("".join(pairs))
    with open(folder / "vectors.txt", "w") as file:
        for name, vector in vectors(random).items():
            numbers = " ".join(f"{number:.5f}" for number in vector)
            file.write(f"{name} {numbers}\n")
    np.savez(folder / "features.npz", files=[row[0] for row in rows], features=features,
             key=FEATURE)
