"""Tests of data.py and drawings.py: layouts, bad input, photos, features, splits."""

import hashlib
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import data
from lab import drawings
from lab.files import load_tensors
from lab.photos import missing_photos, open_photo, photo_files, photo_suffixes

LISTS = {
    "train": ["wet cat", "wet dog", "dry cat", "old Shoes.Flats"],
    "val": ["wet cat", "dry dog"],
    "test": ["wet dog", "old dog", "dry Shoes.Flats"],
}
ROWS = [
    ("a/1.jpg", "wet", "cat", "train"),
    ("a/2.jpg", "wet", "dog", "train"),
    ("b c/3.x.jpg", "dry", "cat", "train"),
    ("4.jpg", "old", "Shoes.Flats", "train"),
    ("5.jpg", "wet", "cat", "val"),
    ("6.jpg", "dry", "dog", "val"),
    ("7.jpg", "wet", "dog", "test"),
    ("8.jpg", "old", "dog", "test"),
    ("9.jpg", "dry", "Shoes.Flats", "test"),
]
NAMES = [row[0] for row in ROWS]
TABLE = "image,state,object,split\n"
# What commit 5c105a3 made, before data.py and drawings.py were rewritten.
DRAWN_SPLITS = "2cd2a71897708c435d521488ddf2159a"
DRAWN_DATA = "b41989a7abda38fa58a79d7aaa95d2f4"


def publish(folder, lists=LISTS, rows=ROWS, photos=True):
    """A folder in the shared layout."""
    (folder / data.SPLIT).mkdir(parents=True)
    for phase, pairs in lists.items():
        (folder / data.SPLIT / f"{phase}_pairs.txt").write_text("\n".join(pairs))
    torch.save([dict(zip(data.METADATA_KEYS, row)) for row in rows], folder / data.METADATA)
    for image, *_ in rows if photos else []:
        touch(folder / "images" / image)
    return folder


def touch(file):
    """A photo of one pixel, whatever its suffix says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (1, 1)).save(file, "PNG")


def photos(folder, states=("wet", "dry"), objects=("cat", "dog"), number=8, style="{}/{}"):
    """A folder of photos, of one pixel each."""
    for state in states:
        for object_ in objects:
            for i in range(number):
                touch(folder / style.format(state, object_) / f"{i}.jpg")
    return folder


def table(folder, text):
    """A folder of own data."""
    folder.mkdir(exist_ok=True)
    (folder / "images.csv").write_text(text)
    return folder


def names(dataset, phase):
    """(image, state, object) of a phase, spelt out."""
    spelt = []
    for image, target in zip(dataset.images[phase], dataset.targets[phase]):
        s, o = divmod(int(target), len(dataset.objects))
        spelt.append((image, dataset.states[s], dataset.objects[o]))
    return spelt


def shown(pairs, split, phase):
    """The set of compositions that a phase's images show."""
    return {pair for pair, its_phase in zip(pairs, split) if its_phase == phase}


def primitives(pairs):
    """(states, objects) of some compositions, as sets."""
    return {state for state, _ in pairs}, {object_ for _, object_ in pairs}


def check(capsys, *arguments):
    """Exit status and output of `python data.py`."""
    status = 0
    try:
        data.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out + captured.err


# ---- reading -------------------------------------------------------------------------------------


def test_shared_layout_by_name_and_by_path(tmp_path):
    odd = (".\\a\\1.jpg", " wet", *ROWS[0][2:])  # as Windows writes it
    folder = publish(tmp_path / "mit-states", rows=[odd, *ROWS[1:]])
    (folder / "feasible_pairs.txt").write_text("wet cat\nwet dog\nold dog\n")
    for given, name in (("mitstates", "mitstates"), (folder, "mit-states"),
                        ("mit-states", "mit-states")):
        dataset = data.load(given, tmp_path)
        assert dataset.name == name and dataset.folder == folder
        assert dataset.upright == (name == "mit-states")  # the field's are read as published
        assert not dataset.notes
        assert np.argwhere(dataset.feasible).tolist() == [[1, 2], [2, 1], [2, 2]]
        for phase in data.PHASES:
            assert names(dataset, phase) == [row[:3] for row in ROWS if row[3] == phase]
            assert dataset.targets[phase].dtype == dataset.pairs[phase].dtype == np.int64


def test_random_folders_equal_the_definition(tmp_path):
    for seed in range(10):
        rng = random.Random(seed)
        every = [f"s{s} o{o}" for s in range(12) for o in range(4)]
        lists = {phase: rng.sample(every, 20) for phase in data.PHASES}
        rows = []
        for i in range(400):
            pair = rng.choice([*every, "NA NA", "s3 NA"]).split()
            rows.append((f"{i}.jpg", *pair, rng.choice([*data.PHASES, "NA"])))
        dataset = data.load(publish(tmp_path / str(seed), lists, rows, photos=False))
        assert dataset.feasible is None
        listed = set().union(*lists.values())
        assert dataset.states == sorted({pair.split()[0] for pair in listed})  # s10 before s2
        spelt = [f"{state} {object_}" for state in dataset.states for object_ in dataset.objects]
        trained = {f"{row[1]} {row[2]}" for row in rows if row[3] == "train"} & listed
        seen = trained | set(lists["train"])
        assert dataset.seen.ravel().tolist() == [pair in seen for pair in spelt]
        for phase in data.PHASES:
            kept = [row[:3] for row in rows if f"{row[1]} {row[2]}" in listed and row[3] == phase]
            assert names(dataset, phase) == kept
            s, o = dataset.pairs[phase].T
            assert [spelt[c] for c in s * len(dataset.objects) + o] == sorted(lists[phase],
                                                                              key=spelt.index)
            world = seen | set(lists[phase])
            assert dataset.candidates(phase).tolist() == [pair in world for pair in spelt]


def test_what_is_odd_is_noted(tmp_path):
    lists = {**LISTS, "train": [*LISTS["train"], "new car"]}
    rows = [
        *ROWS,
        ("10.jpg", "dry", "dog", "test"),  # the set and not the pair says where an image belongs
        ("9.jpg", "dry", "Shoes.Flats", "test"),
        ("5.jpg", "wet", "cat", "test"),
    ]
    dataset = data.load(publish(tmp_path / "x", lists, rows))
    assert dataset.images["test"][-3:] == ["10.jpg", "9.jpg", "5.jpg"]
    assert dataset.seen[1, 1] and dataset.seen.sum() == 5  # new car, of the list alone
    assert dataset.notes == [
        "no training image shows new, car",
        "test images of pairs in neither the test nor the training list: a ceiling of 83.3% in "
        "the closed world",
        "rows of an image that its set has already, each of which counts: 1",
        "images in more than one set: 1",
    ]
    rows = [row for row in ROWS if row[:2] not in (("6.jpg", "dry"), ("7.jpg", "wet"))]
    assert data.load(publish(tmp_path / "y", rows=rows)).notes == [
        "val images show seen compositions alone: only that half can be evaluated",
        "test images show unseen compositions alone: only that half can be evaluated",
    ]


def test_tables_of_images(tmp_path):
    """Separators, quotes, attr, obj and set, and empty rows as spreadsheets write them."""
    rows = [
        ("./a/1.jpg", "dark  red", "car", "train"),
        (" a\\2.jpg ", "blue", '"bus, two\nlines"', "Train"),
        ("3.jpg", "blue", "car", "VAL"),
        ("4.jpg", "dark red", "car", "test"),
        ("5.jpg", "NA", "car", "test"),
    ]
    comma = table(tmp_path / "comma", TABLE + "".join(",".join(row) + "\n" for row in rows))
    swapped = "".join(f"{split};x;{o};{s};{image}\r\n" for image, s, o, split in rows)
    semicolon = f"\ufeffSet;Comment;Obj;attr;image\r\n{swapped};;;;\r\n\r\n"
    for folder in (comma, table(tmp_path / "semicolon", semicolon)):
        dataset = data.load(folder)
        assert dataset.name == folder.name and dataset.upright
        assert names(dataset, "train") == [("a/1.jpg", "dark red", "car"),
                                           ("a/2.jpg", "blue", "bus, two lines")]
        assert names(dataset, "val") == [("3.jpg", "blue", "car")]
        assert names(dataset, "test") == [("4.jpg", "dark red", "car")]
    for folder in ("", "images"):
        touch(dataset.folder / folder / "a/1.jpg")
        assert dataset.path("a/1.jpg") == dataset.folder / folder / "a/1.jpg"


@pytest.mark.parametrize("file, content, said", [
    (f"{data.SPLIT}/val_pairs.txt", None, "val_pairs.txt"),
    (f"{data.SPLIT}/val_pairs.txt", "wet dog\nwet\n", "val_pairs.txt,? line 2: .*'wet'"),
    ("feasible_pairs.txt", "wet cat\nwet bird\n", "'bird'.*of the lists"),
    (data.METADATA, "<html>", f"{data.METADATA} cannot be used"),
    (data.METADATA, [{"image": "1"}], "attr.*expected a list of dicts of texts image, attr, obj"),
    (data.METADATA, [dict(image="1", attr=None, obj="dog", set="val")], "NoneType.*of texts image"),
    (data.METADATA, [dict(zip(data.METADATA_KEYS, ROWS[0]))], "in the set 'val'"),
    ("images.csv", "", "columns ''"),
    ("images.csv", "image,state,object,State\n1.jpg,wet,dog,x\n", "columns 'image,state"),
    ("images.csv", "image,state,object\n1.jpg,wet,dog\n", "line 2: .*train, val or test.*--make-s"),
    ("images.csv", f"{TABLE}1.jpg,wet,dog,train\n2.jpg,,dog,val\n", "images.csv line 3: found"),
    ("images.csv", f"{TABLE}1.jpg,wet,big, dog,train\n", "images.csv line 2: found"),
    ("images.csv", f"{TABLE}1.jpg,wet,dog,\xe4".encode("latin-1"), "images.csv .* in UTF-8"),
])
def test_bad_input_is_one_line(tmp_path, capsys, file, content, said):
    folder = publish(tmp_path / "x")
    if content is None:
        (folder / file).unlink()
    elif isinstance(content, list):
        torch.save(content, folder / file)
    else:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    status, output = check(capsys, folder)
    assert status == 2 and output.startswith("error: ") and output.count("\n") == 1
    assert re.search(said, output)


def test_names_and_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for given, folder in (("shapes", "root/shapes"), ("./shapes", "shapes")):
        Path(folder).mkdir(parents=True)
        assert data.locate(given, "root") == Path(folder)
    for name, said in (("utzappos", "root/ut-zap50k; expected"), ("zappo", "no folder zappo, "),
                       ("shapes", "found neither; `python data.py FOLDER --make-split`")):
        status, output = check(capsys, name, "--data-root", "root")
        assert status == 2 and said in output and output.count("\n") == 1


# ---- photos --------------------------------------------------------------------------------------


def test_the_check_counts_and_names_every_photo_that_is_missing_or_broken(tmp_path, capsys):
    folder = publish(tmp_path / "cgqa", rows=[*ROWS, ("10.jpg", "NA", "dog", "val")])
    for name in ("a/2.jpg", "9.jpg"):
        (folder / "images" / name).write_bytes(b"")
    status, output = check(capsys, "cgqa", "--data-root", tmp_path)
    assert status == 0
    assert output.splitlines()[:-1] == [
        "cgqa: 3 states, 3 objects, 9 compositions",
        "      seen  unseen  images of seen  of unseen",
        "train    4       0               4          0",
        "val      1       1               1          1",
        "test     1       2               1          2",
        f"note: photos in {folder} that no set has: 1",
    ]
    said = output.splitlines()[-1]
    assert said.startswith("note: cannot be read, and --skip-broken leaves out: ")
    assert "a/2.jpg (not an image" in said and "9.jpg (not an image" in said
    (folder / "images/5.jpg").unlink()
    (folder / "images/a/1.jpg").rename(folder / "images/a/1.JPG")
    status, output = check(capsys, folder)
    assert status == 2 and "error: found neither in" in output
    assert "a/1.jpg, 5.jpg; images/a/1.JPG there differ only in case" in output


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tif"])
def test_a_photo_is_turned_upright_once(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    colours = np.random.default_rng(0).integers(0, 256, (20, 32, 3), dtype=np.uint8)
    file = tmp_path / f"a.{suffix}"
    Image.fromarray(colours).save(file, exif=exif)
    made = open_photo(file)
    np.testing.assert_array_equal(made, ImageOps.exif_transpose(Image.open(file)))
    assert ImageOps.exif_transpose(made).size == made.size
    if suffix != "tif":  # which Pillow turns by itself
        assert open_photo(file, upright=False).size == (32, 20)


@pytest.mark.parametrize("suffix", ["png", "webp", "jpg"])
def test_damaged_exif_data_leave_the_picture_readable(tmp_path, suffix):
    for tags in (b"Exif\0\0MX\0*\0\0\0\x08", b"Exif\0\0MM\0*\0\0\0\x08\0"):
        Image.new("RGB", (40, 30), "red").save(tmp_path / f"a.{suffix}", exif=tags)
        assert open_photo(tmp_path / f"a.{suffix}").size == (40, 30)


@pytest.mark.filterwarnings("error")
def test_modes_become_rgb(tmp_path):
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)  # grey
    palette = Image.fromarray(ramp).convert("P")
    palette.save(tmp_path / "palette.png", transparency=bytes(range(256)))
    Image.fromarray(np.stack([ramp, ramp, ramp, ramp.T], 2)).save(tmp_path / "alpha.png")
    Image.fromarray(ramp.astype(np.uint16) * 257).save(tmp_path / "16 bits.png")
    Image.fromarray(ramp.astype(np.int32) * 257).save(tmp_path / "32 bits.tif")
    Image.fromarray((ramp / 255).astype(np.float32)).save(tmp_path / "floats.tif")
    for file in tmp_path.iterdir():
        photo = open_photo(file)
        assert photo.mode == "RGB"
        np.testing.assert_array_equal(photo, np.stack([ramp, ramp, ramp], 2), err_msg=file.name)
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "red.jpg")
    assert open_photo(tmp_path / "red.jpg").getpixel((2, 2))[0] > 240


def test_what_is_no_photo_says_why(tmp_path):
    Image.effect_noise((99, 99), 50).save(tmp_path / "cut.jpg")
    whole = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[:-99])
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic")
    Image.new("F", (9, 9), 4000).save(tmp_path / "floats.tif")
    Image.new("1", (40_000, 10)).save(tmp_path / "strip.png")
    for name, said in (("cut.jpg", "truncated"), ("a.heic", "pillow-heif"),
                       ("floats.tif", r"outside \[0, 1\]"), ("strip.png", "strip of 40000 x 10"),
                       ("none.jpg", "No such")):
        with pytest.raises(ValueError, match=said):
            open_photo(tmp_path / name)


def test_every_photo_format_is_taken_and_the_rest_named(tmp_path):
    suffixes = {".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".tif", ".bmp", ".gif", ".webp", ".mpo"}
    assert suffixes <= photo_suffixes()
    taken = ["a.jpg", "wet/a.TIF", "wet/dog/a.gif"]
    for name in (*taken, "b.xyz", "wet/b.pdf", ".DS_Store", "wet/._1.jpg", "wet/@eaDir/1.jpg"):
        touch(tmp_path / "x" / name)
    (tmp_path / "linked").symlink_to(tmp_path / "x")  # links to folders are followed
    assert photo_files(tmp_path / "linked") == (taken, ["b.xyz", "wet/b.pdf"])


# ---- feature files -------------------------------------------------------------------------------


def save(file, files, features, **more):
    """A file of features of the kind that its suffix names."""
    if file.suffix == ".npz":
        np.savez(file, files=files, features=features, **more)
    else:
        torch.save({"files": files, "features": torch.tensor(features), **more}, file)


@pytest.mark.parametrize("name", data.FEATURES)
def test_features_do_instead_of_photos_but_a_cache_only_without_them(tmp_path, capsys, name):
    dataset = data.load(publish(tmp_path / "x"))
    save(dataset.folder / name, NAMES, np.ones((9, 4)))
    assert data.finished_features(dataset) == dataset.folder / name
    assert data.finished_features(dataset, "pixels") is None
    cache = dataset.folder / "features.npz"
    save(cache, NAMES, np.ones((9, 4)), stamps=np.zeros((9, 2)))
    assert data.finished_features(dataset) is None
    assert data.finished_features(dataset, "mine.npz") == Path("mine.npz")
    for image in NAMES:
        dataset.path(image).unlink()
    assert data.finished_features(dataset) == cache
    assert check(capsys, dataset.folder)[0] == 0


def test_content_decides_how_a_file_is_read(tmp_path):
    """NumPy's arrays, and tensors of any kind."""
    expected = np.array([[0.0, 2.0], [3.0, 0.0], [3.0, 0.0]])
    files = np.array(["./a", "b\\c", "b/c"])
    np.savez(tmp_path / "0.npz", files=files, features=expected.astype("f2"))
    tensor = torch.tensor(expected, requires_grad=True)
    for number, kind in enumerate((tensor, tensor.bfloat16()), 1):
        torch.save({"files": files, "features": kind}, tmp_path / f"{number}.npz")
    for file in tmp_path.iterdir():
        stored = data.read_features(file)
        assert stored["files"] == ["a", "b/c", "b/c"] and stored["features"].dtype == np.float32
        assert (stored["features"] == expected).all()


@pytest.mark.parametrize("content, said", [
    (dict(files=NAMES, features=np.zeros((9, 0))), r"features \(9, 0\)"),
    (dict(files=NAMES, features=np.zeros((2, 4))), r"9 files, features \(2, 4\)"),
    (dict(files=["a", "a"], features=np.eye(2)), "several rows that differ for a"),
    (dict(files=["a"], features=[["x"]]), "expected `files`"),
    (dict(files=np.array(["a"], object), features=[[1]]), "Python objects"),
    (dict(names=NAMES), "'files'.*expected `files`"),
])
def test_bad_feature_files_are_named(tmp_path, content, said):
    np.savez(tmp_path / "f.npz", **content)
    with pytest.raises(ValueError, match=f"f.npz .*{said}"):
        data.read_features(tmp_path / "f.npz")


def test_no_code_in_a_file_is_run(tmp_path):
    torch.save({"files": Path("x"), "features": Counter}, tmp_path / "f.t7")
    with pytest.raises(ValueError, match="f.t7 .*Python objects") as error:
        load_tensors(tmp_path / "f.t7")
    assert "weights_only" not in str(error.value)
    with pytest.raises(FileNotFoundError):
        load_tensors(tmp_path / "none.t7")


def test_a_flipped_bit_is_noticed(tmp_path):
    """Any bit of the stored numbers; the rest of an archive need not differ."""
    numbers = np.full((3, 64), 1.5)
    for name in ("f.npz", "f.t7"):
        save(tmp_path / name, NAMES[:3], numbers)
        body = bytearray((tmp_path / name).read_bytes())
        start = body.index(numbers.tobytes())
        for place in range(start, start + numbers.nbytes, 97):
            body[place] ^= 4
            (tmp_path / name).write_bytes(body)
            with pytest.raises(ValueError, match=f"{name} .*it is damaged"):
                data.read_features(tmp_path / name)
            body[place] ^= 4


# ---- splits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["{}_{}", "{}/{}"])
@pytest.mark.parametrize("root", [".", "images"])
def test_make_split_of_photos_in_folders(tmp_path, capsys, style, root):
    photos(tmp_path / root, ["wet", "dry", "old"], ["cat", "garden hose", "A.B", "big_dog"],
           style=style)
    assert check(capsys, tmp_path, "--make-split")[0] == 0
    dataset = data.load(tmp_path)
    assert len(dataset.every_image) == 96 and not missing_photos(dataset)
    for image, state, object_ in names(dataset, "train"):
        assert image.startswith(style.format(state, object_))
    assert dataset.seen.any(0).all() and dataset.seen.any(1).all() and dataset.seen.sum() == 8
    assert "has a split" in check(capsys, tmp_path, "--make-split")[1]  # never over that


@pytest.mark.parametrize("folder", ["dog", "a/b/c"])
def test_folders_that_name_no_composition(tmp_path, folder):
    touch(tmp_path / folder / "1.jpg")
    with pytest.raises(ValueError, match=f"folders, found {folder}/1.jpg"):
        data.make_split(tmp_path)


def test_make_split_of_a_table_keeps_its_rows_and_columns(tmp_path, capsys):
    rows = [f'{i}.jpg,{"ab"[i % 2]},{"cd"[i % 3 // 2]},"two\nlines, {i}"' for i in range(24)]
    table(tmp_path, "\n".join(["image,state,object,comment", *rows]))
    assert check(capsys, tmp_path, "--make-split", "--share", "0.5")[0] == 2
    data.make_split(tmp_path)
    made = [row for _, row in data.read_table(tmp_path / "images.csv")]
    assert list(made[0]) == ["image", "state", "object", "comment", "split"]
    assert [row["comment"] for row in made] == [f"two\nlines, {i}" for i in range(24)]
    with pytest.raises(ValueError, match="or rows in images.csv, found none"):
        data.make_split(table(tmp_path, "image,state,object"))


def test_divide():
    splits = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        pairs = [(f"s{s}", f"o{o}") for s, o in rng.integers([9, 7], size=(600, 2))]
        for share in (0.1, 0.2):
            split = data.assign_splits(pairs, seed, share)
            splits += split
            train, val, test = [shown(pairs, split, phase) for phase in data.PHASES]
            assert primitives(train) == primitives(pairs)
            assert len(val - train) == len(test - train) == round(share * len(set(pairs)))
            assert not (val - train) & (test - train)
            times = Counter(phase for pair, phase in zip(pairs, split) if pair in train)
            assert times["val"] == times["test"] == round(0.15 * times.total())
    # The draws themselves: who makes a split anew gets the one that results were made with.
    assert hashlib.md5(" ".join(splits).encode()).hexdigest() == DRAWN_SPLITS


def test_divide_few_images_of_few_compositions():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        few = [(f"s{s}", f"o{o}") for s, o in rng.integers(4, size=(7, 2))]
        pairs = [pair for pair in few for _ in range(rng.integers(1, 4))] + [("s", "o")] * 4
        train, val, test = [shown(pairs, data.assign_splits(pairs, seed), phase) for phase in data.PHASES]
        assert primitives(train) == primitives(pairs)
        assert not set(pairs) - train & val & test
    with pytest.raises(ValueError, match="2 images of 2 compositions: too few"):
        data.assign_splits([("a", "x"), ("b", "y")])


# ---- drawings ------------------------------------------------------------------------------------


def test_of_two_that_draw_at_once_both_go_on(tmp_path, monkeypatch):
    """The first ends within the second's drawing."""
    first = tmp_path / "shapes/images.csv"

    def fill(part):
        first.parent.mkdir()
        first.touch()

    monkeypatch.setattr(drawings, "fill", fill)
    drawings.ensure(first.parent)
    assert list(tmp_path.rglob("*")) == [first.parent, first]


def test_a_drawing_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(drawings, "draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drawings.ensure(tmp_path / "shapes")
    assert not list(tmp_path.iterdir())


def test_the_data_are_those_that_the_reports_were_made_with(tmp_path, monkeypatch):
    """Of every composition, to the byte, as drawings.py drew it before it was rewritten."""
    monkeypatch.setattr(drawings, "IMAGES", dict(train=1, seen=0, unseen=1))
    drawings.ensure(tmp_path / "shapes")
    digest = hashlib.md5()
    for path in sorted((tmp_path / "shapes").rglob("*")):
        if path.suffix == ".png":  # by its pixels, since libraries compress differently
            digest.update(Image.open(path).tobytes())
        elif path.suffix in (".csv", ".txt"):
            digest.update(path.read_bytes())
    assert digest.hexdigest() == DRAWN_DATA
