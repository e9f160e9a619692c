"""Tests of feasibility.py: the definition written out, the golden file, closed forms, the published
scores."""

import ast
import csv
import gzip
import io
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import feasibility as F
import words

HERE = Path(__file__).parent
ROOT = HERE.parent
SHARED = HERE / "../../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")

STATES, OBJECTS = ["old", "small", "wet"], ["cat", "dog", "well"]
STATE_VECTORS = np.array([[1, 0.5, 0], [1, 0, 0], [0.6, 0.8, 0]])
OBJECT_VECTORS = np.array([[4, 3, 0], [2, 0, 0], [0, 0, 1.0]])
SEEN = np.array([[0, 0, 1], [1, 0, 0], [0, 1, 1]], bool)  # old well, small cat, wet dog, wet well


def plain(states, objects, seen, mix):
    """Eq. 3 to 5 word for word."""

    def cos(a, b):
        return a @ b / np.sqrt((a @ a) * (b @ b))

    scores = np.ones(seen.shape)
    for s, o in np.argwhere(~seen):
        by_object = max(
            [cos(objects[o], objects[other]) for other in np.flatnonzero(seen[s])], default=-1
        )
        by_state = max(
            [cos(states[s], states[other]) for other in np.flatnonzero(seen[:, o])], default=-1
        )
        scores[s, o] = {
            "mean": (by_state + by_object) / 2,
            "max": max(by_state, by_object),
            "state": by_state,
            "object": by_object,
        }[mix]
    return scores


def random_case(seed, density):
    rng = np.random.default_rng(seed)
    S, O, D = rng.integers(1, 9, 3)
    seen = rng.random((S, O)) < density
    seen[rng.integers(S), rng.integers(O)] = True
    return rng.normal(size=(S, D)), rng.normal(size=(O, D)), seen


def test_another_g_is_a_line(monkeypatch):
    """A function of ρ_state and ρ_obj under a name of its own, as the ones that are there."""
    monkeypatch.setitem(F.MIXES, "min", np.minimum)
    seen = np.array([[True, False], [True, True]])
    vectors = [[1, 0], [0.6, 0.8]], [[1, 0], [0.8, 0.6]]  # ρ of (0, 1): 0.6 by state, 0.8 by object
    assert F.feasibility_scores(*vectors, seen, mix="min")[0, 1] == pytest.approx(0.6)
    assert F.feasibility_scores(*vectors, seen, mix="max")[0, 1] == pytest.approx(0.8)


@pytest.mark.parametrize(
    "density", [0, 0.1, 0.4, 0.9, 1]
)  # one composition seen, empty rows, ..., all seen
@pytest.mark.parametrize("mix", F.MIXES)
def test_scores_equal_the_plain_double_loop(density, mix):
    for seed in range(20):
        case = random_case(seed, density)
        np.testing.assert_allclose(
            F.feasibility_scores(*case, mix=mix), plain(*case, mix), atol=1e-12
        )


def test_scores_equal_the_published_models():
    golden = np.load(HERE / "data/model.npz")
    vectors = (golden[f"param/{kind}_embedder.weight"] for kind in ("attr", "obj"))
    scores = F.feasibility_scores(*vectors, golden["seen"])
    np.testing.assert_allclose(scores, golden["feasibility"], atol=1e-6)


def test_scores_take_any_floats_and_change_no_input():
    states, objects, seen = random_case(3, 0.4)
    expected = F.feasibility_scores(states, objects, seen)
    for dtype, tolerance in (("float32", 1e-6), ("float16", 5e-3)):
        given = states.astype(dtype), objects.astype(dtype) * 7, seen
        before = [array.copy() for array in given]
        scores = F.feasibility_scores(*given)
        assert scores.dtype == np.float64
        np.testing.assert_allclose(scores, expected, atol=tolerance)
        assert all(np.array_equal(*pair) for pair in zip(given, before))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"state_vectors": np.zeros((3, 2))},
            "state_vectors: rows that are zero or not finite: 3, first row 0",
        ),
        ({"object_vectors": [[1, 1], [np.nan, 1], [1, 1]]}, "not finite: 1, first row 1"),
        ({"object_vectors": [[1, 1], [1, 1], [np.inf, 1]]}, "not finite: 1, first row 2"),
        ({"state_vectors": [1, 2, 3]}, r"state_vectors has shape \(3,\)"),
        ({"state_vectors": np.ones((3, 0))}, "state_vectors has shape"),
        ({"state_vectors": np.ones((2, 3))}, r"seen is bool \(3, 3\); expected bool \(2, 3\)"),
        ({"seen": SEEN.astype(int)}, "seen is int64"),
        ({"seen": np.zeros((3, 3), bool)}, "no composition is seen"),
        ({"mix": "sum"}, "unknown mix 'sum': choose from mean, max, state, object"),
    ],
)
def test_bad_input_is_named(change, message):
    given = {
        "state_vectors": STATE_VECTORS,
        "object_vectors": OBJECT_VECTORS,
        "seen": SEEN,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        F.feasibility_scores(**given)


def test_memory_stays_far_below_states_by_objects_by_objects():
    rng = np.random.default_rng(0)  # C-GQA's size
    case = rng.normal(size=(413, 30)), rng.normal(size=(674, 30)), rng.random((413, 674)) < 0.02
    tracemalloc.start()
    scores = F.feasibility_scores(*case)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - scores.nbytes < 50e6


def test_explanations_list_all_supporting_compositions_and_account_for_the_score():
    for seed in range(10):
        states, objects, seen = random_case(seed, 0.4)
        for s, o in np.ndindex(seen.shape):
            why = F.explain(s, o, states, objects, seen)
            others = seen.copy()
            others[s, o] = False
            assert {row[:2] for row in why.lend_state} == {
                (s, i) for i in np.flatnonzero(others[s])
            }
            assert {row[:2] for row in why.lend_object} == {
                (i, o) for i in np.flatnonzero(others[:, o])
            }
            for rows, mix in zip(why, ("object", "state")):
                assert [row[2] for row in rows] == sorted((row[2] for row in rows), reverse=True)
                assert (rows[0][2] if rows else -1) == pytest.approx(
                    plain(states, objects, others, mix)[s, o]
                )


def test_explain_refuses_what_is_no_index_and_gives_plain_numbers():
    for state in True, 3, -1, 0.0, "wet", None:
        message = f"no composition of state {state!r} and object 0 among 3 states by 3 objects"
        with pytest.raises(ValueError, match=message):
            F.explain(state, 0, STATE_VECTORS, OBJECT_VECTORS, SEEN)
    rows = sum(F.explain(np.int64(2), np.int32(0), STATE_VECTORS, OBJECT_VECTORS, SEEN), [])
    assert rows and all([type(value) for value in row] == [int, int, float] for row in rows)


def test_ranking_by_hand():
    scores = np.array([[0.1, 0.9, 1, 0.5], [0.2, 0.2, 0.3, 0.2]])
    ranking = F.ranked(scores, np.array([[0, 0, 1, 0], [0, 0, 0, 0]], bool), top=2)

    def lists(ends):
        return tuple(end.tolist() for end in ends)

    assert [*map(lists, ranking.states)] == [([1, 3], [0, 3]), ([2, 0], [0, 1])]
    assert [*map(lists, ranking.objects)] == [
        ([1, 0], [0, 1]),
        ([0, 1], [1, 0]),
        ([1], [1]),
        ([0, 1], [1, 0]),
    ]
    assert lists(ranking.overall) == ([1, 3], [0, 4])
    with pytest.raises(ValueError, match="top is 0"):
        F.ranked(scores, scores > 1, top=0)


def test_masks_keep_the_seen_and_split_the_unseen():
    scores = np.array([[0.1, 0.4, 1], [0.3, 0.2, -0.5]])
    seen = np.array([[0, 0, 1], [0, 0, 1]], bool)
    assert F.hard_mask(scores, seen, 0.3).tolist() == [[False, True, True], [True, False, True]]
    assert F.hard_mask(scores, seen, np.inf).tolist() == seen.tolist()
    assert F.median_mask(scores, seen).tolist() == [
        [False, True, True],
        [True, False, True],
    ]  # median 0.25
    assert F.median_mask(scores, seen, inverse=True).tolist() == [
        [True, False, True],
        [False, True, True],
    ]
    for inverse in (False, True):
        assert F.median_mask(scores, np.ones_like(seen), inverse=inverse).all()
    with pytest.raises(ValueError, match="seen is float64"):
        F.hard_mask(scores, scores, 0.3)
    with pytest.raises(ValueError, match="must be finite"):
        F.hard_mask(scores * np.nan, seen, 0.3)


def test_combination_is_convex_and_passes_over_what_is_unknown():
    mixed = F.combine(np.array([[0.2, 0.4]]), np.array([[-1, np.nan]]), weight=0.25)
    np.testing.assert_allclose(mixed, [[0.75 * 0.2 - 0.25, 0.4]])
    for external, weight in (([[2.0, 0]], 0.5), ([[0.0, 0]], 1.5), ([[0.0]], 0.5)):
        with pytest.raises(ValueError, match="external scores"):
            F.combine(np.array([[0.2, 0.4]]), external, weight=weight)


def test_auroc_counts_pairs_with_ties_half():
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.integers(0, 6, (4, 5)) / 6
        positive, among = rng.random((2, 4, 5)) < 0.6
        pairs = [
            (a > b) + (a == b) / 2
            for a in scores[positive & among]
            for b in scores[~positive & among]
        ]
        assert F.auroc(scores, positive, among) == pytest.approx(
            np.mean(pairs) if pairs else np.nan, nan_ok=True
        )
    assert np.isnan(F.auroc(scores, among, among)) and np.isnan(F.auroc(scores, ~among, among))


def test_rank_correlation_in_closed_form():
    assert F.rank_correlation(np.array([1, 5, 30]), np.array([-3, 0, 0.1])) == pytest.approx(1)
    assert F.rank_correlation(np.array([1, 2, 2, 3]), np.array([4, 3, 2, 1])) == pytest.approx(
        -4.5 / np.sqrt(4.5 * 5)
    )
    assert np.isnan(F.rank_correlation(np.ones(3), np.arange(3)))
    for a, b in (([], []), ([1, np.nan, 3], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([[1, 2]], [[1, 2]])):
        with pytest.raises(ValueError, match="cannot correlate"):
            F.rank_correlation(a, b)


# ---- real data: the published figures, to 0.005 ----


def shuffled_auroc(states, objects, seen, occurring):
    shuffles = [
        map(np.random.default_rng(seed).permutation, (states, objects)) for seed in range(5)
    ]
    return np.mean(
        [F.auroc(F.feasibility_scores(*vectors, seen), occurring, ~seen) for vectors in shuffles]
    )


def test_figures_of_mit_states():
    data = np.load(HERE / "data/feasibility_mitstates.npz")
    vectors, seen = (data["state_vectors"], data["object_vectors"]), data["seen"]
    for mix, expected in {"mean": 0.934, "max": 0.855, "state": 0.661, "object": 0.752}.items():
        scores = F.feasibility_scores(*vectors, seen, mix=mix)
        assert F.rank_correlation(scores[~seen], data["published"][~seen]) == pytest.approx(
            expected, abs=0.005
        )
    assert F.auroc(data["published"], data["occurring"], ~seen) == pytest.approx(0.849, abs=0.005)
    assert shuffled_auroc(*vectors, seen, data["occurring"]) == pytest.approx(0.57, abs=0.03)
    tables = json.loads((ROOT / "results/paper/ranked.json").read_text())
    figures = F.agreement(
        F.feasibility_scores(*vectors, seen),
        seen,
        data["states"].tolist(),
        data["objects"].tolist(),
        occurring=data["occurring"],
        tables=tables,
    )
    assert figures.pop("AUROC") == pytest.approx(0.833, abs=0.005)
    assert figures == {
        "objects: most (of 75)": 41,
        "objects: least (of 75)": 21,
        "states: most (of 75)": 38,
        "states: least (of 75)": 11,
    }


@needs_shared
@pytest.mark.parametrize(
    "name, lists, vectors, correlation, area, published_area, shuffled_area",
    [
        ("mit-states", ["all"], "words/glove.100d.subset.txt", 0.934, 0.833, 0.849, 0.57),
        ("cgqa", ["val", "test"], "words/glove.100d.subset.txt", 0.956, 0.930, 0.932, 0.81),
        (
            "ut-zap50k",
            ["val", "test"],
            "splits/ut-zap50k/word_vectors_300d.npz",
            0.680,
            0.563,
            0.661,
            None,
        ),  # ours
    ],
)
def test_figures_of_the_real_lists(
    name, lists, vectors, correlation, area, published_area, shuffled_area
):
    pairs, *others = (
        F.read_pairs(SHARED / f"splits/{name}/{part}_pairs.txt") for part in ("train", *lists)
    )
    states, objects = (sorted(set(names)) for names in zip(*pairs.union(*others)))
    lists = pairs, set.union(*others)
    seen, occurring = (
        np.array([[(s, o) in some for o in objects] for s in states]) for some in lists
    )
    published = np.load(SHARED / f"splits/{name}/published_feasibility_glove300.npz")[
        "feasibility"
    ].reshape(seen.shape)
    assert np.array_equal(published == 0, seen)
    vectors = F.read_vectors(SHARED / vectors, states, objects, {})
    scores = F.feasibility_scores(*vectors, seen)
    assert F.rank_correlation(scores[~seen], published[~seen]) == pytest.approx(
        correlation, abs=0.005
    )
    assert F.auroc(scores, occurring, ~seen) == pytest.approx(area, abs=0.005)
    assert F.auroc(published, occurring, ~seen) == pytest.approx(published_area, abs=0.005)
    if shuffled_area:
        assert shuffled_auroc(*vectors, seen, occurring) == pytest.approx(shuffled_area, abs=0.03)


# ---- the script ----


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a pair list and vectors of both kinds, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("pairs.txt").write_text(
        "\ufeff" + "".join(f"{STATES[s]} {OBJECTS[o]}\n" for s, o in np.argwhere(SEEN)), "utf-8"
    )
    rows = zip(STATES + OBJECTS, [*STATE_VECTORS, *OBJECT_VECTORS])
    Path("vectors.txt").write_text(
        "".join(f"{name} {' '.join(map(str, row))}\n" for name, row in rows)
    )
    np.savez(
        "vectors.npz",
        states=STATES,
        objects=OBJECTS,
        state_vectors=STATE_VECTORS,
        object_vectors=OBJECT_VECTORS,
    )
    return tmp_path


def run(capsys, *more, vectors="vectors.txt"):
    F.main(["--pairs", "pairs.txt", "--vectors", vectors, *more])
    return capsys.readouterr().out


def test_script_prints_the_tables(files, capsys):
    scores = F.feasibility_scores(STATE_VECTORS, OBJECT_VECTORS, SEEN)
    out = run(capsys, "--top", "1")
    assert out == run(capsys, "--top", "1", vectors="vectors.npz")
    assert out.count("| most feasible |") == 3
    s, o = np.unravel_index(np.where(SEEN, -2, scores).argmax(), SEEN.shape)
    assert f"| all | {STATES[s]} {OBJECTS[o]} {scores[s, o]:.2f} |" in out
    assert "| cat | wet 0.70 | old 0.45 |" in out  # wet: (0.6 + 0.8) / 2; old: (2 / √5 + 0) / 2
    assert run(capsys, "--object", "cat", "--top", "1").splitlines()[2:] == [
        "| cat | wet 0.70 | old 0.45 |",
        "",
    ]
    assert run(capsys, "--state", "old").startswith("| state |")


def test_script_explains(files, capsys):
    assert run(capsys, "--explain", "wet", "cat").splitlines() == [
        "wet cat: feasibility 0.70",
        "state lent by   wet dog 0.80; wet well 0.00",
        "object lent by  small cat 0.60",
    ]
    assert run(capsys, "--explain", "small", "cat").splitlines() == [
        "small cat: feasibility 1.00, seen",
        "state lent by   none",
        "object lent by  none",
    ]


def test_script_combines_by_name_and_writes_csv(files, capsys):
    external = np.random.default_rng(0).uniform(-1, 1, SEEN.shape)
    np.savez("more.npz", scores=external[::-1, ::-1], states=STATES[::-1], objects=OBJECTS[::-1])
    run(capsys, "--combine", "more.npz", "--weight", "0.25", "--csv", "out.csv")
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["state"], row["object"]) for row in rows] == [
        (s, o) for s in STATES for o in OBJECTS
    ]
    assert [row["seen"] == "1" for row in rows] == SEEN.ravel().tolist()
    expected = np.where(
        SEEN, 1, 0.75 * F.feasibility_scores(STATE_VECTORS, OBJECT_VECTORS, SEEN) + 0.25 * external
    )
    np.testing.assert_allclose(
        [float(row["feasibility"]) for row in rows], expected.ravel(), atol=1e-6
    )
    assert not list(files.glob("*.part"))


def test_script_checks_against_what_is_known(files, capsys):
    Path("occur.txt").write_text("wet cat\nsmall dog\nwet dog\n")
    Path("tables.json").write_text(json.dumps({"objects": {"cat": [["wet"], ["wet"]]}}))
    np.savez(
        "published.npz",
        feasibility=F.feasibility_scores(STATE_VECTORS, OBJECT_VECTORS, SEEN).ravel(),
    )
    out = run(
        capsys, "--occur", "occur.txt", "--published", "published.npz", "--tables", "tables.json"
    ).splitlines()
    assert (
        out[0]
        == "| scores of | rank correlation | AUROC | objects: most (of 1) | objects: least (of 1) |"
    )
    assert (
        out[2] == "| these vectors | 1 | 1 | 1 | 0 |" and out[4] == "| published | 1 | 1 | 1 | 0 |"
    )
    assert out[3].startswith("| shuffled vectors | ") and out[3].count("±") == 4


def test_vectors_of_names_that_are_no_words(files):
    names = ["Wet", "Old-Wet", "old_Well.wet", "Nubuck"]
    vectors, _ = F.read_vectors("vectors.txt", names, ["cat"], {"Nubuck": "small_wet"})
    (old, small, wet), well = STATE_VECTORS, OBJECT_VECTORS[2]
    np.testing.assert_allclose(
        vectors, [wet, (old + wet) / 2, (old + well + wet) / 3, (small + wet) / 2]
    )


NO_TABLES = [
    json.dumps({"objects": table})
    for table in (
        {"dog": ["wet"]},
        {"dog": 3},
        {},
        3,
        {"dog": ["wet", "old"]},
        {"dog": [["wet"], [1]]},
    )
]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--object", "cot"], "no 'cot' in the objects; did you mean 'cat'?"),
        (["--explain", "wet", "zebra"], "no 'zebra' in the objects"),
        (["--weight", "0.3"], "--weight 0.3 is that of --combine FILE, which is not given"),
        (["--explain", "wet", "dog", "--state", "wet"], "leave --object and --state out"),
        (["--pairs", "missing.txt"], "missing.txt"),
        (["--pairs", "bad.txt"], "bad.txt, line 2: expected `state object`"),
        (["--pairs", "empty.txt"], "empty.txt, line 1: expected `state object`"),
        (["--pairs", "odd.txt"], "vectors.txt has no vector for soggy, zebra"),
        (["--vectors", "bad.npz"], "bad.npz: expected an .npz file with states, objects"),
        (
            ["--combine", "vectors.npz"],
            "vectors.npz: expected an .npz file with scores, states, objects",
        ),
        (
            ["--combine", "short.npz"],
            "short.npz: scores are (2, 3) for states (3,) and objects (3,)",
        ),
        (["--combine", "other.npz"], "no 'old' in other.npz"),
        (["--published", "short.npz"], "short.npz: expected an .npz file with feasibility"),
        (["--published", "sizes.npz"], "sizes.npz: feasibility is (7,); expected (3, 3)"),
        (
            ["--vectors", "fewer.npz"],
            "fewer.npz: state_vectors are float64 (2, 3); expected numbers (3, D) for states",
        ),
        (["--vectors", "shorter.txt"], "shorter.txt, line 2: 'small' needs 3 numbers, not '1 0'"),
        (["--vectors", "letters.txt"], "letters.txt, line 1: 'old' needs 2 numbers, not '0.5 x'"),
        (["--names", "bad.txt"], "bad.txt: expected JSON, {name: word} ("),
        (["--names", "number.json"], 'number.json holds {"wet": 3}; expected {name: word}'),
        (
            ["--tables", "list.json"],
            "list.json holds []; expected {objects|states: {name: [most, least]}}",
        ),
        *(
            (["--tables", f"{i}.json"], f"{i}.json holds {table}; expected {{objects")
            for i, table in enumerate(NO_TABLES)
        ),
        (["--tables", "kind.json"], "unknown kind of table 'cats'"),
    ],
)
def test_script_says_what_is_wrong_in_one_line(files, capsys, arguments, message):
    Path("bad.txt").write_text("wet cat\nwet old cat\n")
    Path("odd.txt").write_text("soggy zebra\n")
    Path("empty.txt").write_text("\n")
    Path("bad.npz").write_text("not an archive")
    Path("list.json").write_text("[]")
    Path("kind.json").write_text('{"cats": {"dog": [[], []]}}')
    Path("number.json").write_text('{"wet": 3}')
    for i, table in enumerate(NO_TABLES):
        Path(f"{i}.json").write_text(table)
    Path("shorter.txt").write_text("old 1 2 3\nsmall 1 0\n")
    Path("letters.txt").write_text("old 0.5 x\n")
    np.savez(
        "fewer.npz",
        states=STATES,
        objects=OBJECTS,
        state_vectors=np.ones((2, 3)),
        object_vectors=OBJECT_VECTORS,
    )
    np.savez("short.npz", scores=np.zeros((2, 3)), states=STATES, objects=OBJECTS)
    np.savez("other.npz", scores=np.zeros((1, 3)), states=["wet"], objects=OBJECTS)
    np.savez("sizes.npz", feasibility=np.zeros(7))
    with pytest.raises(SystemExit) as stop:
        F.main(["--pairs", "pairs.txt", "--vectors", "vectors.txt", *arguments])
    out, error = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_file_works_alone(files):
    nodes = [*ast.walk(ast.parse(Path(F.__file__).read_text(encoding="utf-8")))]
    imports = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    # common only where it is, when the file is run as a script
    assert imports - sys.stdlib_module_names - {"common"} == {"numpy"}
    (files / "feasibility.py").write_bytes(Path(F.__file__).read_bytes())
    command = [
        sys.executable,
        "feasibility.py",
        "--pairs",
        "pairs.txt",
        "--vectors",
        "vectors.txt",
        "--state",
        "wet",
    ]
    assert (
        "| wet | cat 0.70 | cat 0.70 |"
        in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.skipif(os.name != "posix", reason="a pipe of Unix")
@pytest.mark.parametrize("alone", [True, False])
def test_a_reader_that_has_enough_is_no_error(files, alone):
    script = F.__file__
    if alone:
        script = files / "feasibility.py"
        script.write_bytes(Path(F.__file__).read_bytes())
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(script), "--pairs", "pairs.txt", "--vectors", "vectors.txt"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=files)
    os.close(writer)
    assert ended.stderr == b""


# ---- what people bring (types, pair lists, vector files) ----


def test_torch_tensors_are_as_good_as_arrays():
    torch = pytest.importorskip("torch")
    states, objects, seen = random_case(0, 0.3)
    states = torch.from_numpy(states).to(torch.bfloat16).requires_grad_()
    objects = torch.nn.Parameter(torch.from_numpy(objects))
    arrays = (states.detach().double().numpy(), objects.detach().numpy())
    scores = F.feasibility_scores(states, objects, torch.from_numpy(seen))
    assert np.array_equal(scores, F.feasibility_scores(*arrays, seen))
    tensor = torch.from_numpy(scores).requires_grad_()
    assert np.array_equal(F.hard_mask(tensor, seen, 0.1), F.hard_mask(scores, seen, 0.1))


def test_every_float_type_gives_the_mask_of_its_numbers():
    rng = np.random.default_rng(0)
    for dtype in ("float64", "float32", "float16"):
        scores = rng.uniform(-1, 1, (7, 9)).astype(dtype)
        scores[0, :3] = 0.1, 0.7, -0.3  # rounded, these lie on either side of the threshold
        seen = rng.random((7, 9)) < 0.3
        for threshold in (0.1, 0.7, -0.3, float(scores[2, 2]), scores[2, 2], np.inf):
            expected = [
                [bool(seen[s, o]) or float(scores[s, o]) >= float(threshold) for o in range(9)]
                for s in range(7)
            ]
            assert F.hard_mask(scores, seen, threshold).tolist() == expected
        wide = scores.astype(float)
        for inverse in (False, True):
            assert np.array_equal(
                F.median_mask(scores, seen, inverse=inverse),
                F.median_mask(wide, seen, inverse=inverse),
            )


SCORES = np.array([[0.1, 0.4], [0.3, 0.2]])
NOT_SEEN = np.zeros((2, 2), bool)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: F.hard_mask(SCORES, NOT_SEEN, np.nan), "threshold is nan; expected a number"),
        (lambda: F.hard_mask(SCORES, NOT_SEEN, "0.3"), "threshold is '0.3'"),
        (lambda: F.hard_mask(SCORES, NOT_SEEN, None), "threshold is None"),
        (lambda: F.hard_mask(SCORES, NOT_SEEN, [0.3]), "threshold is"),
        (
            lambda: F.hard_mask(SCORES.astype(str), NOT_SEEN, 0.3),
            "feasibility is <U32; expected floats",
        ),
        (lambda: F.hard_mask(SCORES.astype("uint8"), NOT_SEEN, 0.3), "feasibility is uint8"),
        (lambda: F.hard_mask([[1, 2], [3]], NOT_SEEN, 0.3), "feasibility is no array"),
        (lambda: F.ranked(SCORES.astype("uint8"), NOT_SEEN), "feasibility is uint8"),
        (lambda: F.ranked(SCORES, NOT_SEEN, top=1.5), "top is 1.5; expected an integer"),
        (lambda: F.ranked(SCORES, NOT_SEEN, top="3"), "top is '3'"),
        (lambda: F.ranked(SCORES, NOT_SEEN, top=True), "top is True"),
        (lambda: F.median_mask(SCORES, "seen"), "seen is <U4"),
        (
            lambda: F.hard_mask(SCORES, NOT_SEEN.astype("uint8"), 0.3),
            r"states by objects \(from 0 and 1 by .astype\(bool\)\)",
        ),
        (lambda: F.combine(SCORES, SCORES, weight="0.5"), "weight is '0.5'"),
        (lambda: F.combine(SCORES, SCORES, weight=np.nan), "weight is nan"),
        (lambda: F.combine(SCORES, SCORES.astype(str), weight=0.5), "external is <U32"),
        (lambda: F.combine(SCORES * np.nan, SCORES, weight=0.5), "finite feasibility"),
        (lambda: F.median_mask(SCORES, NOT_SEEN, inverse="no"), "inverse is 'no'"),
        (lambda: F.median_mask(SCORES, NOT_SEEN, inverse=SCORES), "inverse is"),
        (
            lambda: F.hard_mask(np.ma.masked_equal(SCORES, 0.1), NOT_SEEN, 0.3),
            "feasibility is a masked array",
        ),
        (lambda: F.hard_mask(SCORES, NOT_SEEN, np.zeros((9, 9))), "threshold is ndarray; expected"),
        (lambda: F.feasibility_scores([[1.0]], [[1.0]], [[True]], mix=SCORES), "unknown mix"),
        (lambda: F.rank_correlation(["a"], ["b"]), "a is <U1"),
        (lambda: F.feasibility_scores([["a"]], [[1.0]], [[True]]), "state_vectors is <U1"),
        (lambda: F.feasibility_scores([[1.0]], [[1.0]], [[True]], mix=["mean"]), "unknown mix"),
        (
            lambda: F.read_vectors("no file", ["old"], ["cat"], {}, missing="skip"),
            "missing is 'skip'",
        ),
    ],
)
def test_wrong_types_are_value_errors_that_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_integers_of_numpy_are_a_top_and_an_index():
    assert len(F.ranked(SCORES, NOT_SEEN, top=np.uint8(2)).overall[0]) == 2
    assert F.explain(np.uint64(0), np.uint8(1), STATE_VECTORS, OBJECT_VECTORS, SEEN).lend_state


SPACED = {("Off White", "rain coat"), ("wet", "dog")}


@pytest.mark.parametrize(
    "text, training, everything",
    [
        ("Off White\train coat\nwet\tdog\n", SPACED, SPACED),
        ("Off White,rain coat\r\n\r\nwet, dog\r\n", SPACED, SPACED),
        ("\ufeffwet dog\n  small   dog \n", {("wet", "dog"), ("small", "dog")}, None),
        (
            "image,state,object,split\na.jpg,Off White,rain coat,Training\nb.jpg,wet,dog,train\n"
            "c.jpg,wet,cat,val\nd.jpg,NA,cat,train\n,,,\n",
            SPACED,
            SPACED | {("wet", "cat")},
        ),
        (
            'sep=;\nImage;attr;"obj";set\na.jpg;"Off White";rain coat;train\nb.jpg;wet;dog;TRAIN\n',
            SPACED,
            SPACED,
        ),
        ("image\tstate\tobject\na.jpg\tOff White\train coat\nb.jpg\twet\tdog\n", SPACED, SPACED),
        ('"Off White","rain coat"\n"wet", "dog"\n', SPACED, SPACED),
        ("State Object\nwet dog\n", {("wet", "dog")}, None),
        ("state\tobject\nOff White\train coat\nwet\tdog\n", SPACED, SPACED),
    ],
    ids="tab comma spaces images.csv semicolon no-split quoted spaced-header tab-header".split(),
)
def test_pair_lists_and_tables_of_images(text, training, everything, tmp_path):
    path = tmp_path / "images.csv"
    path.write_bytes(text.encode())
    assert F.read_pairs(path, training=True) == training
    assert F.read_pairs(path) == (everything or training)
    assert F.read_pairs(tmp_path, training=True) == training  # the folder


@pytest.mark.parametrize(
    "content, message",
    [
        (b"a b\tc\nwet dog\n", "line 1: expected"),
        (b"wet\tdog\nwet\t\n", "line 2: expected"),
        (b"image,state,object\na.jpg,wet,\n", "line 2: state or object is empty"),
        (b"image,state,object,split\na.jpg,wet,dog,val\n", "has no training rows"),
        ("wet caf\xe9\n".encode("latin-1"), "no UTF-8 text"),
    ],
)
def test_bad_pair_lists_are_named(content, message, tmp_path):
    (tmp_path / "pairs.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"pairs.txt.*{message}"):
        F.read_pairs(tmp_path / "pairs.txt", training=True)


NAMES = [
    "Faux.Fur",
    "Faux.Leather",
    "Nubuck",
    "Boots.Mid-Calf",
    "trash_can",
    "black_and_white",
    "old",
    "Old",
    "Off White ",
    "Lip_and_Nail",
    "and",
    "--",
    "Red.T-Shirt",
    "new york",
]


def test_names_become_words_as_in_words_py():
    for kind in ("glove", "text", "npz"):
        for name in NAMES:
            assert F._readings(name, kind) == words._readings(name, kind)
            for reading in F._readings(name, kind):
                for word in reading:
                    assert F._spellings(word, kind) == words._spellings(word, kind)
    assert F.EXCEPTIONS == words.EXCEPTIONS
    assert F.EXCEPTIONS_OF_GLOVE == words.EXCEPTIONS_OF["glove"]


VOCABULARY = (
    "old new fake fur fake_fur leather grainy shoe midcalf boots red and york trashcan can trash"
)


def vector_text(header=b"", between=b" ", bom=b"", first=b""):
    rng = np.random.default_rng(0)
    lines = []
    for word in VOCABULARY.split() + ["old", "fur"]:  # repeated: the first counts
        lines.append(
            between.join([word.encode(), *(f"{x:.4f}".encode() for x in rng.normal(size=4))])
        )
    return bom + header + first + b"\n".join(lines) + b"\n"


@pytest.mark.parametrize(
    "content",
    [
        vector_text(),
        vector_text(header=b"18 4\n"),
        vector_text(between=b"\t"),
        vector_text(bom=b"\xef\xbb\xbf"),
        vector_text(bom=b"\xef\xbb\xbf", header=b"18 4\r\n"),
        vector_text(first=b". . . 1 2 3 4\nold man 1 2 3 4\nat name@domain.com 1 2 3 4\n"),
        gzip.compress(vector_text()),
    ],
    ids="plain counts tab bom bom+counts spaces gz".split(),
)
@pytest.mark.parametrize("missing", ["random", "mean"])
def test_vector_files_read_as_in_words_py(content, missing, tmp_path):
    path = tmp_path / "vectors"
    path.write_bytes(content)
    states, objects = NAMES[:7], ["Shoe", "new_leather", "wet dog", "red.boots"]
    with pytest.warns(UserWarning, match="wet dog"):
        ours = np.concatenate(F.read_vectors(path, states, objects, {}, missing=missing))
    with pytest.warns(UserWarning, match="wet dog"):
        theirs = words.word_vectors([*states, *objects], path, missing=missing)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_archives_of_vectors_read_as_in_words_py(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(4, 3))
    np.savez(tmp_path / "a.npz", names=["Faux.Fur", "old", "Old", "shoe"], vectors=vectors)
    np.savez(
        tmp_path / "b.npz",
        states=["Faux.Fur", "old"],
        state_vectors=vectors[:2],
        objects=["Old", "shoe"],
        object_vectors=vectors[2:],
    )
    for name in ("a.npz", "b.npz"):
        ours = F.read_vectors(tmp_path / name, ["Faux.Fur", "old"], ["Old", "old_shoe"], {})
        theirs = words.word_vectors(["Faux.Fur", "old", "Old", "old_shoe"], tmp_path / name)
        np.testing.assert_allclose(np.concatenate(ours), theirs, atol=1e-6)


def test_binary_vectors_are_named(tmp_path):
    (tmp_path / "w2v.bin").write_bytes(b"1 2\nold \x00\x00\x80?\x00\x00\x00\x00\n")
    with pytest.raises(ValueError, match="w2v.bin begins with b'1 2.*expected text lines"):
        F.read_vectors(tmp_path / "w2v.bin", ["old"], ["cat"], {})


def test_script_refuses_a_top_of_zero(files, capsys):
    for more in ([], ["--explain", "wet", "cat"]):
        with pytest.raises(SystemExit):
            run(capsys, "--top", "0", *more)
        assert capsys.readouterr().err == "error: --top is 0; expected at least 1\n"


def test_script_goes_on_without_vectors_and_reads_images_csv(files, capsys):
    rows = "".join(f"a.jpg,{STATES[s]},{OBJECTS[o]},train\n" for s, o in np.argwhere(SEEN))
    Path("images.csv").write_text("image,state,object,split\n" + rows + "b.jpg,wet,zebra,test\n")
    expected = run(capsys)
    for place in ("images.csv", "."):
        assert run(capsys, "--pairs", place) == expected
    with pytest.raises(SystemExit):
        run(capsys, "--pairs", place, "--occur", "images.csv")
    assert "has no vector for zebra; with" in capsys.readouterr().err
    F.main(["--pairs", ".", "--occur", ".", "--vectors", "vectors.txt", "--missing", "random"])
    out, error = capsys.readouterr()
    assert "| these vectors |" in out
    assert error == "warning: vectors.txt has no vector for zebra: random vectors stand in\n"


def damaged_vectors():
    """Contents of vector files of old, wet and cat that cannot be read to the end, by name."""
    text = b"old 1 0\nwet 0 1\ncat 1 1\n" * 400
    packed = gzip.compress(text)
    flipped = bytearray(packed)
    flipped[40] ^= 255
    return {
        "cut.gz": packed[:-20],
        "short.gz": packed[:12],
        "flipped.gz": bytes(flipped),
        "wide.txt": b"3 99999999999999999999\nold 1 0\n",
        "none.txt": b"3 0\nold\nwet\ncat\n",
    }


@pytest.mark.parametrize("missing", ["error", "random"])
@pytest.mark.parametrize("name", damaged_vectors())
def test_damaged_vectors_are_one_line(name, missing, tmp_path, capsys):
    (tmp_path / name).write_bytes(damaged_vectors()[name])
    (tmp_path / "pairs.txt").write_text("old cat\nwet cat\n")
    with pytest.raises(SystemExit) as exit:
        F.main(["--pairs", str(tmp_path / "pairs.txt"), "--vectors", str(tmp_path / name),
                "--missing", missing])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert name in error


@pytest.mark.parametrize("vectors", [np.full((3, 2), "a"), np.ones((3, 2)) * 1j])
def test_vectors_that_are_no_numbers_are_named(vectors, tmp_path):
    np.savez(tmp_path / "vectors.npz", names=["old", "wet", "cat"], vectors=vectors)
    with pytest.raises(ValueError, match="vectors.npz: vectors are .* expected numbers"):
        F.read_vectors(tmp_path / "vectors.npz", ["old", "wet"], ["cat"], {})


def as_npz(**arrays):
    """The bytes of an .npz."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


NO_NAMES = dict(states=[True, False, True], objects=[True, False, True])
WRONG_FILES = [  # a file, its content (None: a named pipe), what the error says of it
    ("pairs.txt", None, "no plain file"),
    ("pairs.txt", b"<!DOCTYPE html>\n<html><body>Log in</body></html>\n", "web page"),
    ("occur.txt", b"<!DOCTYPE html>\n<html><body>Log in</body></html>\n", "web page"),
    ("vectors.npz", None, "no plain file"),
    ("vectors.npz", b"words", "not loaded"),
    ("vectors.npz", as_npz(names=["old"], vectors=np.array([[None]])), "not loaded"),
    ("vectors.npz", as_npz(states=STATES, state_vectors=STATE_VECTORS * np.nan, objects=OBJECTS,
                           object_vectors=OBJECT_VECTORS), "not finite"),
    ("names.json", None, "no plain file"),
    ("names.json", b"[" * 100_000, "expected JSON"),
    ("combine.npz", None, "no plain file"),
    ("combine.npz", as_npz(scores=np.ones((3, 3)), **NO_NAMES), "expected names"),
    ("combine.npz", as_npz(scores=np.full((3, 3), "x"), states=STATES, objects=OBJECTS), "<U1"),
    ("published.npz", None, "no plain file"),
    ("published.npz", as_npz(feasibility=np.full((3, 3), "x")), "<U1"),
    ("published.npz", as_npz(feasibility=np.full((3, 3), np.nan)), "nan"),
]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("number", range(len(WRONG_FILES)))
def test_files_of_other_content_are_named(number, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pairs.txt").write_text("old well\nsmall cat\nwet dog\nwet well\n")
    Path("occur.txt").write_text("old cat\n")
    Path("names.json").write_text("{}")
    vectors = dict(states=STATES, state_vectors=STATE_VECTORS, objects=OBJECTS,
                   object_vectors=OBJECT_VECTORS)
    np.savez("vectors.npz", **vectors)
    np.savez("combine.npz", scores=np.zeros((3, 3)), states=STATES, objects=OBJECTS)
    np.savez("published.npz", feasibility=np.ones((3, 3)))
    arguments = ["--pairs", "pairs.txt", "--occur", "occur.txt", "--vectors", "vectors.npz",
                 "--names", "names.json", "--combine", "combine.npz", "--published",
                 "published.npz"]
    F.main(arguments)
    name, content, words_of_it = WRONG_FILES[number]
    Path(name).unlink()
    if content is None:
        os.mkfifo(name)
    else:
        Path(name).write_bytes(content)
    with pytest.raises(SystemExit) as exit:
        F.main(arguments)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.startswith(f"error: {name}"), error
    assert error.count("\n") == 1 and words_of_it in error and "allow_pickle" not in error
