"""Draw the picture at the head of README, results/teaser.png, from the run of the built-in data.

    python compcos.py && python -m lab.teaser
"""

import argparse
from random import Random

import data
from lab import shell
from lab.files import read_rows
from lab.photos import open_photo


def draw_teaser():
    """Draw two test photos of unseen compositions with the answers of runs/shapes-compcos-open.

    One is drawn by lot among those answered right, one among those answered wrong. Four training
    photos of the same state or object stand before each.
    """
    from matplotlib.figure import Figure

    def is_right(row):
        return (row["open_state"], row["open_object"]) == (row["state"], row["object"])

    dataset = data.load("shapes")
    random = Random(0)
    unseen = [row for row in read_rows("runs/shapes-compcos-open/predictions.csv")
              if row["seen"] == "0"]
    random.shuffle(unseen)
    grid = Figure(figsize=(10, 4.4), layout="constrained").subplots(2, 5)
    for axes, row in zip(grid, [max(unseen, key=is_right), min(unseen, key=is_right)]):
        related = [image for image in dataset.images["train"]
                   if row["state"] in image or row["object"] in image]
        for ax, image in zip(axes, [*random.sample(related, 4), row["image"]]):
            ax.imshow(open_photo(dataset.path(image)))
            ax.axis("off")
            ax.set_title(" ".join(image.split("_")[:2]))  # of state_object_number.png
        ax.set_title("new: {state} {object}\nanswer: {open_state} {open_object}".format(**row))
    ax.figure.savefig("results/teaser.png")


@shell.command
def main(argv=None):
    """Draw the picture."""
    argparse.ArgumentParser(description=draw_teaser.__doc__.splitlines()[0]).parse_args(argv)
    draw_teaser()


if __name__ == "__main__":
    main()
