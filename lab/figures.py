"""The pictures of a report: functions of lab.reproduce.Results. Only they need matplotlib."""

from itertools import cycle, product

import numpy as np

from lab.files import read_rows
from lab.photos import open_photo


def answers_of(dataset, metrics):
    """Return the truth (N,) and the answers (N,) without mask and with it, as s * O + o."""
    index = {pair: i for i, pair in enumerate(product(dataset.states, dataset.objects))}
    rows = read_rows(metrics["folder"] / "predictions.csv")
    return [np.array([index[row[f"{name}state"], row[f"{name}object"]] for row in rows])
            for name in ("", "open_", "open_masked_")]


def draw_lines(x_label, y_label, lines):
    """Return a figure of lines: (label, x (K,), y (K,), which points to mark as `markevery`).

    x and y are fractions, and the figure shows percent. Markers tell lines apart without colours.
    """
    from matplotlib.figure import Figure

    ax = Figure(layout="constrained").subplots()
    for (label, x, y, marked), marker in zip(lines, cycle("os^DvXP*")):
        points = 100 * np.array([x, y], float)  # None, where there are no images, becomes NaN
        ax.plot(*points, label=label, marker=marker, markevery=marked)
    ax.set(xlabel=x_label, ylabel=y_label)
    ax.figure.legend(loc="outside lower center", ncols=2)
    return ax.figure


def draw_curves(results, runs):
    """Return a figure of seen against unseen accuracy of runs, {label: run}, as the bias grows."""
    lines = []
    for label, run in runs.items():
        for metrics in results.runs[run][:1]:  # none of a failed run
            with np.load(metrics["folder"] / "curves.npz") as curves:
                lines.append((label, curves["open_unseen"], curves["open_seen"], 0.1))
    return draw_lines("accuracy on unseen compositions (%)", "accuracy on seen compositions (%)",
                      lines)


def draw_threshold(results):
    """Return a figure of AUC against the share that the mask hides, a line for each seed."""
    lines = []
    for metrics in results.runs["full"]:
        curve = metrics["threshold_curve"]
        lines.append((metrics["folder"].name, curve["removed"], curve["auc"],
                      [curve["threshold"].index(metrics["threshold"])]))
    return draw_lines("compositions hidden (%)", "validation AUC (%)", lines)


def draw_photos(results):
    """Return a figure of test photos with the answers of both models, first seed."""
    from matplotlib.figure import Figure

    dataset = results.inputs.dataset
    truth, closed, _ = answers_of(dataset, results.runs["closed"][0])
    _, _, full = answers_of(dataset, results.runs["full"][0])
    names = dataset.compositions
    misled = np.random.default_rng(0).permutation(np.flatnonzero(closed != truth))
    is_right = full[misled] == truth[misled]
    figure = Figure(figsize=(18, 14), layout="constrained")
    for part, images in zip(figure.subfigures(2), (misled[is_right], misled[~is_right])):
        for place, image in enumerate(images[:10], 1):
            ax = part.add_subplot(2, 5, place)
            ax.axis("off")
            ax.imshow(open_photo(dataset.path(dataset.images["test"][image]), dataset.upright))
            ax.set_title(f"closed: {names[closed[image]]}\nfull: {names[full[image]]}\n"
                         f"truth: {names[truth[image]]}", size=8, loc="left")
    return figure
