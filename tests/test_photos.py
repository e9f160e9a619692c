"""Tests of lab/photos.py: photos are opened alike, found in folders, and checked."""

import os
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps

from lab.photos import find_images, list_photos, open_photo
from test_data import touch

# ---- opening ----


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_a_photo_is_turned_upright_once(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    colours = np.random.default_rng(0).integers(0, 256, (20, 32, 3), dtype=np.uint8)
    file = tmp_path / f"a.{suffix}"
    Image.fromarray(colours).save(file, exif=exif)
    made = open_photo(file)
    np.testing.assert_array_equal(made, ImageOps.exif_transpose(Image.open(file)))
    assert ImageOps.exif_transpose(made).size == made.size  # the tag is gone
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
    for file in tmp_path.iterdir():
        photo = open_photo(file)
        np.testing.assert_array_equal(photo, np.stack([ramp, ramp, ramp], 2), err_msg=file.name)


def test_what_is_no_photo_says_why(tmp_path):
    Image.effect_noise((99, 99), 50).save(tmp_path / "noise.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "noise.jpg").read_bytes()[:-99])
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic")
    Image.new("F", (9, 9)).save(tmp_path / "floats.tif")
    (tmp_path / "empty.heic").touch()
    for name, said in (("cut.jpg", "truncated"), ("a.heic", "pillow-heif"), ("none.jpg", "No such"),
                       ("floats.tif", "of floats"), ("empty.heic", "^an empty file$")):
        with pytest.raises(ValueError, match=said):
            open_photo(tmp_path / name)


# ---- finding ----


def test_every_photo_format_is_taken_and_the_rest_named(tmp_path, capsys):
    taken = ["@home/b.jpg", "__x/NA/c.jpg", "a.jpg", "b.heic", "wet/a.TIF", "wet/dog/a.gif"]
    left = ["wet/@eaDir/1.jpg", "__MACOSX/1.jpg", "wet/._1.jpg", ".hidden/1.jpg"]
    for name in (*taken, *left, "b.xyz", "wet/b.pdf", "images.csv"):
        touch(tmp_path / "x" / name)
    (tmp_path / "linked").symlink_to(tmp_path / "x")  # links to folders are followed
    assert list_photos(tmp_path / "linked") == taken
    assert "not those of photos: b.xyz, wet/b.pdf; save" in capsys.readouterr().out


def test_links_that_lead_back_are_not_followed(tmp_path):
    for name in ("x/a", "x/b", "shared"):
        touch(tmp_path / name / "1.jpg")
    links = {"a/back": "x", "a/b": "x/b", "b/a": "x/a", "c": "shared", "d": "shared"}
    for link, target in links.items():
        (tmp_path / "x" / link).symlink_to(tmp_path / target)
    found = ["a/1.jpg", "a/b/1.jpg", "b/1.jpg", "b/a/1.jpg", "c/1.jpg", "d/1.jpg"]
    assert list_photos(tmp_path / "x") == found


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take no such name")
def test_a_file_name_that_is_not_utf8_is_one_line(tmp_path):
    path = tmp_path / os.fsdecode(b"\xe9.jpg")
    touch(path)
    for argument in (tmp_path, path):
        with pytest.raises(ValueError, match=r"udce9.jpg' is not UTF-8: rename the file"):
            find_images([str(argument)])


def test_images_that_files_patterns_and_folders_name(tmp_path, capsys):
    for name in ("a.png", "new/b.JPG", "new/deep/c.png", "new/notes.doc", "empty/a.csv"):
        touch(tmp_path / name)
    a, b, c = (f"{tmp_path}/{name}" for name in ("a.png", "new/b.JPG", "new/deep/c.png"))
    assert find_images([a, f"{tmp_path}/new", b]) == [a, b, c]
    assert "left out of" in capsys.readouterr().out
    assert find_images([f"{tmp_path}/new/*.JPG", "gone.png"]) == [b, "gone.png"]
    with pytest.raises(ValueError, match="no image in"):
        find_images([f"{tmp_path}/empty"])
