"""The built-in dataset: 64 x 64 pictures of toys, plants and vessels in states of which most do not transfer.

    python shapes.py [--out data/shapes] [--seed 0]      # what `python compcos.py` does on its own

15 objects in three families and 15 states: four of each family (a vessel is full, a toy striped) and three colours that
suit all. So 105 of the 225 compositions are feasible, which is known, and the others are never drawn. Pictures vary in
place, size, turn, shade, background and noise; states of different families look alike (a hollow toy, an empty
vessel), so that infeasible compositions distract. The folder has the layout of own data (images.csv, images/), with
feasible_pairs.txt for the truth, features.npz (small pixels) and vectors.txt: family similarity as noisy as in word
vectors, and nothing about which pairs are feasible.
"""

import argparse
import csv
import os
import shutil
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

import common

SIZE, DRAWN = 64, 128  # pixels a side of the picture, and of the canvas that is scaled down to it
IMAGES = dict(train=40, seen=6, unseen=25)  # a composition: in training; seen or unseen in each of validation and test
OBJECTS = {"toy": ("cross", "disc", "square", "star", "triangle"),
           "plant": ("cactus", "flower", "leaf", "mushroom", "tree"),
           "vessel": ("bottle", "bowl", "cup", "goblet", "jar")}
STATES = {"toy": ("dotted", "halved", "hollow", "striped"), "plant": ("budding", "burnt", "frosted", "wilted"),
          "vessel": ("broken", "empty", "full", "tipped"), "any": ("blue", "green", "red")}
FEATURE = "16 x 16 pixels, standardised"  # the simple feature that serves this dataset
COLOURS = {"blue": (40, 70, 220), "green": (30, 170, 60), "red": (215, 40, 40)}
PLAIN = ((190, 150, 40), (150, 70, 170), (60, 170, 180), (150, 110, 80))  # of what is in no colour state
GRADIENT = Image.linear_gradient("L").resize((DRAWN, DRAWN))  # of the light in the background
VECTOR_SIZE, LEAST, MOST = 100, 0.05, 0.5  # of the squared length of a vector, the share that is its family's


def ring(n, radius=1.0, turn=0.0, inner=None, centre=(0.0, 0.0)):
    """A regular polygon, or with `inner` a star, as points (n or 2n, 2) in [-1, 1]."""
    count = n if inner is None else 2 * n
    angles = 2 * np.pi * np.arange(count) / count - np.pi / 2 + turn
    radii = radius if inner is None else np.where(np.arange(count) % 2, inner, radius)
    return np.stack([np.cos(angles) * radii + centre[0], np.sin(angles) * radii + centre[1]], 1)


def box(left, top, right, bottom):
    """A rectangle as points (4, 2)."""
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], float)


def outlines():
    """The polygons of each object, x to the right and y down in [-1, 1]."""
    half = ring(32)[8:25]  # the lower half of a disc
    return {
        "cross": [box(-.3, -1, .3, 1), box(-1, -.3, 1, .3)], "disc": [ring(32)], "square": [box(-.8, -.8, .8, .8)],
        "star": [ring(5, inner=.42)], "triangle": [ring(3, 1.1)],
        "cactus": [box(-.25, -1, .25, 1), box(-.8, -.5, -.55, .2), box(-.8, .1, 0, .3), box(.55, -.2, .8, .5),
                   box(0, .35, .8, .55)],
        "flower": [*(ring(12, .33, centre=(.42 * np.cos(a), .42 * np.sin(a) - .4)) for a in np.arange(5) * 1.2566),
                   box(-.08, 0, .08, 1)],
        "leaf": [np.array([[0, -1], [.6, -.3], [.45, .4], [0, .7], [-.45, .4], [-.6, -.3]]), box(-.06, .6, .06, 1)],
        "mushroom": [half * [1, -.9], box(-.28, 0, .28, 1)],
        "tree": [np.array([[0, -1], [.8, .3], [-.8, .3]]), box(-.18, .3, .18, 1)],
        "bottle": [box(-.45, -.2, .45, 1), box(-.17, -1, .17, -.1)], "bowl": [half * [1, .9]],
        "cup": [box(-.7, -.7, .45, .8), box(.45, -.4, .95, -.2), box(.75, -.4, .95, .4), box(.45, .2, .95, .4)],
        "goblet": [np.array([[-.8, -1], [.8, -1], [.12, .2], [-.12, .2]]), box(-.1, .1, .1, .9), box(-.5, .85, .5, 1)],
        "jar": [box(-.7, -.6, .7, 1), box(-.5, -1, .5, -.75)],
    }


OUTLINES = outlines()


def silhouette(name, state, random):
    """The object as a mask ("L"), where it lies (left, top, right, bottom), and its length unit in canvas pixels."""
    unit = random.uniform(.26, .38) * DRAWN
    centre = DRAWN / 2 + random.uniform(-.1, .1, 2) * DRAWN
    angle = random.uniform(-.2, .2) + (random.choice([-1, 1]) * np.pi / 2 if state == "tipped" else 0)
    rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    mask = Image.new("L", (DRAWN, DRAWN))
    for polygon in OUTLINES[name]:
        if state == "wilted":  # the higher, the more it hangs to one side
            polygon = np.stack([polygon[:, 0] + .35 * (1 - polygon[:, 1]) ** 2 * .6, .3 + .7 * polygon[:, 1]], 1)
        ImageDraw.Draw(mask).polygon([tuple(point) for point in polygon @ rotation * unit + centre], fill=255)
    return mask, mask.getbbox(), unit


def pattern(state, mask, bounds, unit, random):
    """(where the object has its colour, where it has the accent of its state): masks ("L")."""
    left, top, right, bottom = bounds
    part = Image.new("L", mask.size)
    draw, shift = ImageDraw.Draw(part), random.uniform(0, .4) * unit
    step = .42 * unit
    if state in ("hollow", "empty", "full"):
        inside = mask.filter(ImageFilter.BoxBlur(2 + unit / 14)).point([0] * 250 + [255] * 6)
        rim = ImageChops.subtract(mask, inside)
        draw.rectangle([0, top + (bottom - top) * random.uniform(.35, .5), DRAWN, DRAWN], fill=255 if state == "full" else 0)
        return rim, ImageChops.multiply(part, mask)
    if state == "striped":
        for x in np.arange(-DRAWN + shift, DRAWN, step):
            draw.line([(x, 0), (x + DRAWN, DRAWN)], fill=255, width=int(step / 2))
    elif state in ("dotted", "budding"):
        for x, y in np.stack(np.meshgrid(*[np.arange(shift, DRAWN, step)] * 2), -1).reshape(-1, 2):
            if state == "dotted" or random.random() < .5:
                draw.ellipse([x - step / 4, y - step / 4, x + step / 4, y + step / 4], fill=255)
    elif state in ("halved", "frosted", "burnt"):
        middle = (left + right) / 2 if state == "halved" else top + (bottom - top) * random.uniform(.4, .6)
        boxes = dict(halved=[0, 0, middle, DRAWN], frosted=[0, 0, DRAWN, middle], burnt=[0, middle, DRAWN, DRAWN])
        draw.rectangle(boxes[state], fill=255)
    elif state == "broken":
        xs, middle = np.linspace(left - 2, right + 2, 7), (top + bottom) / 2
        draw.line([(x, middle + (-1) ** i * .18 * unit) for i, x in enumerate(xs)], fill=255, width=int(.22 * unit))
    return mask, ImageChops.multiply(part, mask)


def draw(state, name, random):
    """One picture (RGB, 64 x 64) of an object in a state; `random` a NumPy generator."""
    mask, bounds, unit = silhouette(name, state, random)
    body, accent = pattern(state, mask, bounds, unit, random)
    shade = random.uniform(.75, 1.15)
    colour = np.array(COLOURS.get(state) or PLAIN[random.integers(len(PLAIN))]) * shade + random.normal(0, 12, 3)
    light = random.uniform(170, 235) + random.normal(0, 10, 3)
    tone = {"burnt": (35, 25, 20), "frosted": (245, 250, 255), "budding": (240, 130, 180), "broken": light,
            "full": np.array([120, 160, 210]) * shade}.get(state, colour * .35)
    picture, dark = (Image.new("RGB", mask.size, _rgb(light * part)) for part in (1, .75))
    picture.paste(dark, mask=GRADIENT.rotate(90 * random.integers(4)))
    picture.paste(_rgb(colour), mask=body)
    picture.paste(_rgb(tone), mask=accent)
    noisy = np.array(picture.reduce(DRAWN // SIZE), np.float32) + 8 * random.standard_normal((SIZE, SIZE, 3), np.float32)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def feature(picture):
    """(768,) float32: 16 x 16 pixels of the picture, brought to mean 0 and deviation 1; `features.pixels`, without torch."""
    small = np.array(picture.resize((16, 16), Image.Resampling.BOX), np.float32).ravel()
    return (small - small.mean()) / max(small.std(), 1)


def _rgb(colour):
    """Three numbers as a colour of Pillow's."""
    return tuple(int(min(max(value, 0), 255)) for value in colour)


def compositions(random):
    """{(state, object): "train", "val" or "test"} of the 105 feasible ones: a fifth each unseen, every primitive seen."""
    feasible = sorted((state, name) for family, names in OBJECTS.items() for name in names
                      for state in STATES[family] + STATES["any"])
    wanted = [*["val"] * (len(feasible) // 5), *["test"] * (len(feasible) // 5)]
    split = dict.fromkeys(feasible, "train")
    for i in random.permutation(len(feasible)):
        rest = [pair for pair, phase in split.items() if phase == "train" and pair != feasible[i]]
        if wanted and all(sum(word in pair for pair in rest) >= 2 for word in feasible[i]):
            split[feasible[i]] = wanted.pop()
    return split


def vectors(random):
    """{name: (100,)}: own noise and a share of the family's direction; states and objects have unrelated families."""
    table = {}
    for families in (STATES, OBJECTS):
        for names in families.values():
            centre = random.normal(size=VECTOR_SIZE)
            for name in names:
                share = random.uniform(LEAST, MOST)
                own = random.normal(size=VECTOR_SIZE)
                table[name] = (share ** .5 * centre + (1 - share) ** .5 * own) / VECTOR_SIZE ** .5
    return table


def kind(own, phase):
    """Which number of IMAGES a phase has of a composition whose own set is given."""
    return "train" if phase == "train" else "seen" if own == "train" else "unseen"


def make(folder, seed=0):
    """Draw the dataset into a new folder, which appears only once it is whole. ValueError if there is something already."""
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} is there already: remove it, or choose another --out")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        (part / "images").mkdir(parents=True)
        random = np.random.default_rng(seed)
        split = compositions(random)
        jobs = [(pair, phase) for pair, own in split.items() for phase in ("train", "val", "test")
                if own in ("train", phase) for _ in range(IMAGES[kind(own, phase)])]
        features = {}
        with open(part / "images.csv", "w", newline="") as file, \
                common.Progress("drawing shapes", len(jobs), "images") as progress:
            rows = csv.writer(file)
            rows.writerow(["image", "state", "object", "split"])
            for i, ((state, name), phase) in enumerate(jobs):
                image = f"{state}_{name}_{i:04d}.png"
                picture = draw(state, name, random)
                picture.save(part / "images" / image, compress_level=1)
                features[image] = feature(picture)
                rows.writerow([image, state, name, phase])
                progress.update()
        (part / "feasible_pairs.txt").write_text("".join(f"{state} {name}\n" for state, name in split))
        lines = [" ".join([name, *(f"{x:.5f}" for x in row)]) for name, row in vectors(random).items()]
        (part / "vectors.txt").write_text("\n".join(lines) + "\n")
        np.savez(part / "features.npz", files=list(features), features=np.stack(list(features.values())), key=FEATURE)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def ensure(folder):
    """`make` it unless it is there."""
    if not (Path(folder) / "images.csv").exists():
        make(folder)


@common.command
def main(argv=None):
    """Draw the dataset."""
    parser = argparse.ArgumentParser(description="Draw the built-in dataset.")
    parser.add_argument("--out", default="data/shapes", help="a new folder (default data/shapes)")
    parser.add_argument("--seed", type=int, default=0, help="another drawing (default 0)")
    options = parser.parse_args(argv)
    make(options.out, options.seed)
    print(f"drawn into {options.out}; check it with: python data.py {options.out}")


if __name__ == "__main__":
    main()
