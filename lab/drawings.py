"""The built-in dataset: 64 x 64 pictures of toys, plants and vessels in states that suit some.

    drawings.ensure("data/shapes")  # as `python compcos.py` does

15 objects belong to three families. Of the 15 states, four suit each family only (a vessel can be
full, a toy striped), and three colours suit all. So 105 of the 225 compositions are feasible, and
the others are never drawn: unlike in photos, the truth is known. Pictures vary in position, size,
rotation, shade, background and noise. Some states of different families look alike (a hollow toy,
an empty vessel), so that infeasible compositions distract.

The folder has the layout of users' own data (images.csv and images/). feasible_pairs.txt lists the
feasible compositions, and features.npz contains small pictures as features. vectors.txt contains
vectors in which names of one family are about as similar as in word vectors. They say nothing about
which compositions are feasible.
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

SIZE = 64     # width and height of a picture in pixels
CANVAS = 128  # width and height of the canvas, which is scaled down to the picture
# Images of a composition: in training, and in each of val and test where it is seen or unseen.
IMAGES = dict(train=40, seen=6, unseen=25)
OBJECTS = {"toy": ("cross", "disc", "square", "star", "triangle"),
           "plant": ("cactus", "flower", "leaf", "mushroom", "tree"),
           "vessel": ("bottle", "bowl", "cup", "goblet", "jar")}
STATES = {"toy": ("dotted", "halved", "hollow", "striped"),
          "plant": ("budding", "burnt", "frosted", "wilted"),
          "vessel": ("broken", "empty", "full", "tipped"),
          "any": ("blue", "green", "red")}
FEATURE = "16 x 16 pixels, standardised"  # what `feature` returns, in words
# Colours of the states that are colours, and of objects in other states.
COLOURS = {"blue": (40, 70, 220), "green": (30, 170, 60), "red": (215, 40, 40)}
OTHER_COLOURS = ((190, 150, 40), (150, 70, 170), (60, 170, 180), (150, 110, 80))
GRADIENT = Image.linear_gradient("L").resize((CANVAS, CANVAS))  # for the background
VECTOR_SIZE = 100
LEAST_SHARE = 0.05  # the family's share of the squared length of a vector
MOST_SHARE = 0.5


def ring(n, radius=1.0):
    """Return the corners (n, 2) of a regular polygon around 0, the first one at the top."""
    angles = 2 * np.pi * np.arange(n) / n - np.pi / 2
    return radius * np.stack([np.cos(angles), np.sin(angles)], 1)


def box(left, top, right, bottom):
    """Return the corners (4, 2) of a rectangle."""
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], float)


def bar(half_width, top, bottom):
    """Return the corners (4, 2) of a rectangle around the vertical axis."""
    return box(-half_width, top, half_width, bottom)


def outlines():
    """Return {object: its polygons}, with x to the right and y down, about within [-1, 1]."""
    lower_half = ring(32)[8:25]  # of a disc, in polygon form
    petals = []
    for angle in np.arange(5) * 1.2566:
        centre = .42 * np.cos(angle), .42 * np.sin(angle) - .4
        petals.append(ring(12, .33) + centre)
    blade = np.array([[0, -1], [.6, -.3], [.45, .4], [0, .7], [-.45, .4], [-.6, -.3]])
    crown = np.array([[0, -1], [.8, .3], [-.8, .3]])
    spikes = np.resize([[1], [.42]], (10, 1))  # every other corner is closer to the centre
    chalice = np.array([[-.8, -1], [.8, -1], [.12, .2], [-.12, .2]])
    return {
        "cross": [bar(.3, -1, 1), bar(1, -.3, .3)],
        "disc": [ring(32)],
        "square": [bar(.8, -.8, .8)],
        "star": [ring(10) * spikes],
        "triangle": [ring(3, 1.1)],
        "cactus": [bar(.25, -1, 1), box(-.8, -.5, -.55, .2), box(-.8, .1, 0, .3),
                   box(.55, -.2, .8, .5), box(0, .35, .8, .55)],
        "flower": [*petals, bar(.08, 0, 1)],
        "leaf": [blade, bar(.06, .6, 1)],
        "mushroom": [lower_half * [1, -.9], bar(.28, 0, 1)],
        "tree": [crown, bar(.18, .3, 1)],
        "bottle": [bar(.45, -.2, 1), bar(.17, -1, -.1)],
        "bowl": [lower_half * [1, .9]],
        "cup": [box(-.7, -.7, .45, .8), box(.45, -.4, .95, -.2), box(.75, -.4, .95, .4),
                box(.45, .2, .95, .4)],
        "goblet": [chalice, bar(.1, .1, .9), bar(.5, .85, 1)],
        "jar": [bar(.7, -.6, 1), bar(.5, -1, -.75)],
    }


OUTLINES = outlines()


def silhouette(object_, state, random):
    """Draw an object as a mask ("L"); return it and the object's scale in pixels of the canvas."""
    unit = random.uniform(.26, .38) * CANVAS
    centre = CANVAS / 2 + random.uniform(-.1, .1, 2) * CANVAS
    angle = random.uniform(-.2, .2)
    if state == "tipped":
        angle += random.choice([-1, 1]) * np.pi / 2
    rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    mask = Image.new("L", (CANVAS, CANVAS))
    for polygon in OUTLINES[object_]:
        if state == "wilted":  # higher points hang further to one side
            x = polygon[:, 0] + .35 * (1 - polygon[:, 1]) ** 2 * .6
            y = .3 + .7 * polygon[:, 1]
            polygon = np.stack([x, y], 1)
        points = polygon @ rotation * unit + centre
        ImageDraw.Draw(mask).polygon(points.ravel().tolist(), fill=255)
    return mask, unit


def pattern(state, mask, unit, random):
    """Draw two masks ("L"): where the object has its colour, and where its state's accent."""
    accent = Image.new("L", mask.size)
    pencil = ImageDraw.Draw(accent)
    left, top, right, bottom = mask.getbbox()
    shift = random.uniform(0, .4) * unit  # where stripes and dots begin
    step = .42 * unit
    level = 0  # where content, frost or burning begins or ends, as a share of the object's height
    body = mask
    # Some states do not use the shift or the level. Both are drawn nevertheless: otherwise all
    # later random numbers, and with them all pictures, would change.
    if state in ("hollow", "empty", "full"):  # keep the part near the edge only
        level = random.uniform(.35, .5)
        blurred = mask.filter(ImageFilter.BoxBlur(2 + unit / 14))
        inside = blurred.point(lambda value: 255 if value >= 250 else 0)
        body = ImageChops.subtract(mask, inside)
    elif state in ("frosted", "burnt"):
        level = random.uniform(.4, .6)
    elif state == "striped":  # diagonals, half as wide as the step between them
        for x in np.arange(-CANVAS + shift, CANVAS, step):
            pencil.line([(x, 0), (x + CANVAS, CANVAS)], fill=255, width=int(step / 2))
    elif state in ("dotted", "budding"):  # a grid of dots; buds fill half of it
        radius = step / 4
        for y in np.arange(shift, CANVAS, step):
            for x in np.arange(shift, CANVAS, step):
                if state == "dotted" or random.random() < .5:
                    pencil.ellipse([x - radius, y - radius, x + radius, y + radius], fill=255)
    elif state == "broken":  # a zigzag across the middle
        x = np.linspace(left - 2, right + 2, 7)
        y = (top + bottom) / 2 + np.resize([.18, -.18], 7) * unit
        pencil.line(list(zip(x, y)), fill=255, width=int(.22 * unit))

    level = top + (bottom - top) * level
    below = [0, level, CANVAS, CANVAS]
    areas = {"full": below, "burnt": below, "frosted": [0, 0, CANVAS, level],
             "halved": [0, 0, (left + right) / 2, CANVAS]}
    if state in areas:
        pencil.rectangle(areas[state], fill=255)
    return body, ImageChops.multiply(accent, mask)


def draw(state, object_, random):
    """Draw one picture of an object in a state.

    Args:
        state (str): One of the names in STATES.
        object_ (str): One of the names in OBJECTS.
        random (np.random.Generator): The source of all variation.

    Returns:
        PIL.Image.Image: An RGB image of 64 x 64 pixels.
    """
    mask, unit = silhouette(object_, state, random)
    body, accent = pattern(state, mask, unit, random)
    shade = random.uniform(.75, 1.15)
    colour = np.array(COLOURS[state]) if state in COLOURS else random.choice(OTHER_COLOURS)
    colour = colour * shade + random.normal(0, 12, 3)
    light = random.uniform(170, 235) + random.normal(0, 10, 3)
    accents = {"burnt": (35, 25, 20), "frosted": (245, 250, 255), "budding": (240, 130, 180),
               "full": np.array([120, 160, 210]) * shade,
               "broken": light}  # the background shows through a crack

    picture = Image.new("RGB", mask.size, _rgb(light))
    dark = Image.new("RGB", mask.size, _rgb(light * .75))
    picture.paste(dark, mask=GRADIENT.rotate(90 * random.integers(4)))
    picture.paste(_rgb(colour), mask=body)
    picture.paste(_rgb(accents.get(state, colour * .35)), mask=accent)
    noise = 8 * random.standard_normal((SIZE, SIZE, 3), np.float32)
    noisy = np.array(picture.reduce(CANVAS // SIZE), np.float32) + noise
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def _rgb(colour):
    """Return three numbers as a colour for Pillow."""
    return tuple(np.clip(colour, 0, 255).astype(int).tolist())


def feature(picture):
    """Return a picture's small pixels as a feature vector.

    Args:
        picture (PIL.Image.Image): An RGB image of any size.

    Returns:
        np.ndarray: (768,), float32. 16 x 16 pixels of three colours, shifted to mean 0 and divided
            by their standard deviation, or by 1 where that is less than 1.
    """
    small = np.array(picture.resize((16, 16), Image.Resampling.BOX), np.float32).ravel()
    return (small - small.mean()) / max(small.std(), 1)


def compositions(random):
    """Split the 105 feasible compositions: {(state, object): "train", "val" or "test"}.

    A fifth each goes to val and test as unseen compositions. Every state and object keeps at least
    two compositions in training.
    """
    feasible = []
    for family, objects in OBJECTS.items():
        feasible += itertools.product(STATES[family] + STATES["any"], objects)
    feasible.sort()
    fifth = len(feasible) // 5
    to_assign = [phase for phase in ("val", "test") for _ in range(fifth)]
    split = dict.fromkeys(feasible, "train")
    in_training = Counter(itertools.chain(*feasible))  # compositions of each
    for index in random.permutation(len(feasible)):
        pair = feasible[index]
        if to_assign and min(in_training[name] for name in pair) > 2:
            split[pair] = to_assign.pop()
            in_training.subtract(pair)
    return split


def vectors(random):
    """Draw {name: vector (100,)}, each a mix of a direction of the name's family and of noise.

    The families of states are unrelated to those of objects.
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
    """Draw the dataset into a folder, unless the folder exists.

    The folder appears only when it is complete. Several processes may call this at the same time.

    Args:
        folder (str or Path): The folder of the dataset, such as "data/shapes".

    Raises:
        OSError: The folder cannot be written.
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
    """Draw the dataset into a folder that contains nothing but an empty `images/`."""
    random = np.random.default_rng(0)
    split = compositions(random)
    rows = []
    features = []
    with shell.Progress("drawing shapes", len(split), "compositions") as progress:
        for (state, object_), own_phase in split.items():
            counts = {own_phase: IMAGES["unseen"]}
            if own_phase == "train":
                counts = {"train": IMAGES["train"], "val": IMAGES["seen"], "test": IMAGES["seen"]}
            for phase in np.repeat(list(counts), list(counts.values())):  # each image's
                image = f"{state}_{object_}_{len(rows):04d}.png"
                picture = draw(state, object_, random)
                picture.save(folder / "images" / image, compress_level=1)
                rows.append((image, state, object_, phase))
                features.append(feature(picture))
            progress.update()
    write_rows(folder / "images.csv", ("image", "state", "object", "split"), rows)
    np.savetxt(folder / "feasible_pairs.txt", list(split), fmt="%s")
    with open(folder / "vectors.txt", "w") as file:
        for name, vector in vectors(random).items():
            numbers = " ".join(f"{number:.5f}" for number in vector)
            file.write(f"{name} {numbers}\n")
    np.savez(folder / "features.npz", files=[row[0] for row in rows], features=features,
             key=FEATURE)
