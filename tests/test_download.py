"""Tests of download.py against a server on this machine.

What the true addresses give, in small, and what can fail.
"""

import gzip
import io
import random
import re
import shutil
import tarfile
import threading
import time
import zipfile
import zlib
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from PIL import Image

import data
import download

PAIRS = {
    "train": "Suede Boots.Ankle\nFaux.Fur Shoes.Flats",
    "val": "Suede Boots.Ankle",
    "test": "Suede Shoes.Flats",
}
LABELS = [
    (
        "Suede_Boots.Ankle/1.9.jpg",
        "Shoes/Ankle & Co./L.A. Gear/1.9.jpg",
        "Suede",
        "Boots.Ankle",
        "train",
    ),
    (
        "Faux.Fur_Shoes.Flats/1.9.jpg",
        "Shoes/Flats/L.A. Gear/1.9.jpg",
        "Faux.Fur",
        "Shoes.Flats",
        "train",
    ),
    ("Suede_Boots.Ankle/2.jpg", "Shoes/Ankle & Co./2.jpg", "Suede", "Boots.Ankle", "val"),
    ("Suede_Shoes.Flats/3.jpg", "Shoes/Flats/Børn/3.jpg", "Suede", "Shoes.Flats", "test"),
]


class Handler(BaseHTTPRequestHandler):
    """Serves server.files[path] = (bytes, fault), with faults as often as they say.

    Logs the first byte asked for.
    """

    def do_GET(self):
        """Answer as the fault says: (name, times left, bytes before it)."""
        body, fault = self.server.files.get(self.path, (None, None))
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        self.server.asked.append(start)
        name, times, after = fault or ("", 0, 0)
        if body is None or name == "broken" and times:
            return self.fail(body, times)
        if name == "other range" and times and start:
            self.server.files[self.path] = body, (name, times - 1, after)
            self.send_response(206)
            start -= after
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        elif name != "no ranges" and start:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            start = 0
            self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        if name != "no length":
            self.send_header("Content-Length", len(body) - start)
        self.send_header("ETag", f'"{self.server.version}"')
        self.end_headers()
        if name not in ("cut", "stall", "no ranges") or not times:
            return self.send(body[start:])
        self.server.files[self.path] = body, (name, times - 1, after)
        self.send(body[start : start + after])
        if name == "stall":
            time.sleep(1)

    def send(self, body):
        """Write, even to one who has left."""
        try:
            self.wfile.write(body)
        except OSError:
            pass

    def fail(self, body, times):
        """404, or 503 while `times` last."""
        if body is not None:
            self.server.files[self.path] = body, ("broken", times - 1, 0)
        self.send_error(404 if body is None else 503)

    def log_message(self, *arguments):
        """Quiet."""


@pytest.fixture
def server(monkeypatch):
    """The server, with every address of the table turned to it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.version = {}, [], 1
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    turned = {
        name: f"{server.url}/{url.rpartition('/')[2]}" for name, url in download.ADDRESSES.items()
    }
    monkeypatch.setattr(download, "ADDRESSES", turned)
    yield server
    server.shutdown()
    server.server_close()


def zipped(files):
    """A zip file's bytes from name -> bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(files, **links):
    """A tar.gz file's bytes from name -> bytes, and name -> target."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return out.getvalue()


def layout(labels=LABELS, old=False):
    """Lists and metadata as the splits archive holds them below a dataset's folder."""
    out = io.BytesIO()
    rows = [dict(zip(("image", "_image", "attr", "obj", "set"), row)) for row in labels]
    torch.save(rows, out, _use_new_zipfile_serialization=not old)
    lists = {f"{data.SPLIT}/{phase}_pairs.txt": pairs.encode() for phase, pairs in PAIRS.items()}
    return {**lists, f"metadata_{data.SPLIT}.t7": out.getvalue()}


def below(folder, files):
    """The same files below a folder."""
    return {f"{folder}/{name}": content for name, content in files.items()}


def tree(folder):
    """All files below a folder, hidden ones too: relative name -> bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def fetch(server, file, **options):
    """What is tested, without waiting between tries."""
    download.fetch(server.url + "/a.zip", file, wait=0, **options)


ZIP = zipped({f"{i}.bin": bytes(range(256)) * 4000 for i in range(3)})  # 3 MB


def photo(name):
    """The bytes of a picture that no other name has."""
    file = io.BytesIO()
    colour = zlib.crc32(name.encode()).to_bytes(4, "big")
    Image.new("RGB", (2, 2), tuple(colour[:3])).save(file, "PNG")
    return file.getvalue()


def test_utzappos(server, tmp_path, capsys):
    wanted = {image: photo(inside) for image, inside, *_ in LABELS}
    photos = {inside.replace("ø", "├╕"): photo(inside) for _, inside, *_ in LABELS}
    splits = below("mit-states", {data.SPLIT + "/train_pairs.txt": b"wet dog"}) | below(
        "ut-zap50k", layout(old=True)
    )
    photos = below("ut-zap50k-images", {**photos, "Shoes/Flats/99.jpg": b""})
    server.files["/compositional_split_natural.tar.gz"] = tarred(splits), None
    server.files["/ut-zap50k-images.zip"] = zipped(photos), None
    download.main(["utzappos", "--data-root", str(tmp_path)])
    assert data.main(["utzappos", "--data-root", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert (
        "utzappos: 2 states, 2 objects, 4 compositions; 3 listed" in output
        and "problem" not in output
    )
    assert tree(tmp_path) == below("ut-zap50k", {**layout(old=True), **below("images", wanted)})
    asked = len(server.asked)
    download.main(["utzappos", "--data-root", str(tmp_path)])
    assert len(server.asked) == asked and "already" in capsys.readouterr().out
    (
        tmp_path / f"ut-zap50k/metadata_{data.SPLIT}.t7"
    ).unlink()  # the lists are there, the metadata is not
    download.main(["utzappos", "--data-root", str(tmp_path)])
    assert data.main(["utzappos", "--data-root", str(tmp_path)]) == 0


def test_utzappos_names_that_several_files_share_are_not_guessed(tmp_path):
    (tmp_path / f"metadata_{data.SPLIT}.t7").write_bytes(layout()[f"metadata_{data.SPLIT}.t7"])
    names = ["x/Shoes/Ankle & Co./2.jpg", "Shoes/Flats/B?rn/3.jpg", "a/1.9.jpg", "b/1.9.jpg"]
    found = [(name, f"images/{label[0]}") for name, label in zip(names, LABELS[2:])]
    assert download.plan_utzappos(names, tmp_path) == found


def test_mitstates(server, tmp_path):
    labels = [("wet_old_dog/1.jpg", "", "Suede", "Boots.Ankle", "train"), *LABELS]
    server.files["/compositional_split_natural.tar.gz"] = (
        tarred(below("./mit-states", layout(labels))),
        None,
    )
    photos = {
        "release_dataset/images/wet old dog/1 a.jpg": b"1",
        "release_dataset/images/adj cat/2.jpg": b"2",
        "release_dataset/README.txt": b"",
        "__MACOSX/release_dataset/images/._x": b"",
    }
    server.files["/release_dataset.zip"] = zipped(photos), None
    download.download("mitstates", tmp_path)
    assert tree(tmp_path / "mit-states") == {
        **layout(labels),
        "images/wet_old_dog/1 a.jpg": b"1",
        "images/adj_cat/2.jpg": b"2",
    }


@pytest.mark.parametrize("top", ["", "cgqa/", "some/where/"])
def test_cgqa(server, tmp_path, top):
    files = {
        **layout(
            [(f"{i}.jpg", "", "Suede", "Boots.Ankle", phase) for i, phase in enumerate(data.PHASES)]
        ),
        **{f"images/{i}.jpg": b"x" for i in range(3)},
    }
    server.files["/cgqa.zip"] = (
        zipped({"notes.txt": b"x", **{top + name: files[name] for name in files}}),
        None,
    )
    download.download("cgqa", tmp_path)
    assert tree(tmp_path) == below("cgqa", files)


def test_vectors(server, tmp_path):
    server.files["/GoogleNews-vectors-negative300.bin.gz"] = gzip.compress(b"w2v"), None
    server.files["/cc.en.300.bin.gz"] = gzip.compress(b"fast"), None
    server.files["/glove.6B.zip"] = (
        zipped({"glove.6B.50d.txt": b"50", "glove.6B.300d.txt": b"300"}),
        None,
    )
    download.download("own", tmp_path, ["word2vec", "fasttext", "glove"])
    assert tree(tmp_path) == {
        "w2v/GoogleNews-vectors-negative300.bin.gz": gzip.compress(b"w2v"),
        "fast/cc.en.300.bin.gz": gzip.compress(b"fast"),
        "glove/glove.6B.300d.txt": b"300",
    }
    (tmp_path / "w2v/GoogleNews-vectors-negative300.bin.gz").rename(
        tmp_path / "w2v/GoogleNews-vectors-negative300.bin"
    )
    asked = len(server.asked)
    download.download("own", tmp_path, ["word2vec", "fasttext", "glove"])
    assert len(server.asked) == asked
    with pytest.raises(ValueError, match="no address for 'own': only utzappos, mitstates, cgqa"):
        download.download("own", tmp_path)


def test_cut_connections_are_resumed_where_they_ended(server, tmp_path):
    server.files["/a.zip"] = ZIP, ("cut", 3, 1_000_000)
    fetch(server, tmp_path / "a.zip")
    assert tree(tmp_path) == {"a.zip": ZIP} and server.asked == [0, 0, 1_000_000, 0, 2_000_000]


def test_the_next_run_goes_on_unless_the_file_has_changed(server, tmp_path):
    server.files["/a.zip"] = ZIP, ("cut", 9, 500_000)
    with pytest.raises(
        OSError, match="ended after 500,000 of 3,072,[0-9]+ bytes; run it again to go on"
    ):
        fetch(server, tmp_path / "a.zip", tries=1)
    server.files["/a.zip"], server.asked[:] = (ZIP, None), []
    assert list(tree(tmp_path).values()) == [ZIP[:500_000]] and not (tmp_path / "a.zip").exists()
    copy = Path(shutil.copytree(tmp_path, tmp_path.with_name(tmp_path.name + " copy")))
    fetch(server, tmp_path / "a.zip")
    assert tree(tmp_path) == {"a.zip": ZIP} and server.asked == [0, 500_000]
    changed, server.version = ZIP[:-5] + b"later", 2
    server.files["/a.zip"], server.asked[:] = (changed, None), []
    fetch(server, copy / "a.zip")
    assert (copy / "a.zip").read_bytes() == changed and server.asked == [0]


@pytest.mark.parametrize("after", [500_000, -7])
def test_a_partial_answer_of_another_range_is_asked_for_whole(server, tmp_path, after):
    server.files["/a.zip"] = ZIP, ("cut", 1, 1_000_000)
    with pytest.raises(OSError, match="run it again to go on"):
        fetch(server, tmp_path / "a.zip", tries=1)
    server.files["/a.zip"], server.asked[:] = (ZIP, ("other range", 1, after)), []
    fetch(server, tmp_path / "a.zip", tries=1)
    assert tree(tmp_path) == {"a.zip": ZIP} and server.asked == [0, 1_000_000, 0]


@pytest.mark.parametrize(
    "fault", [("no ranges", 1, 9_000), ("no length", 0, 0), ("broken", 3, 0), ("stall", 1, 9_000)]
)
def test_servers_without_ranges_or_lengths_or_patience(server, tmp_path, fault):
    server.files["/a.zip"] = ZIP, fault
    fetch(server, tmp_path / "a.zip", timeout=0.3)
    assert tree(tmp_path) == {"a.zip": ZIP}


def test_failures_name_the_address_and_what_to_do(server, tmp_path):
    file = tmp_path / "a.zip"
    with pytest.raises(
        OSError, match=f"{server.url}/a.zip: HTTP Error 404: Not Found; .* save that file as {file}"
    ):
        fetch(server, file)
    assert server.asked == [0]  # no use to try again
    server.files["/a.zip"] = ZIP, ("stall", 9, 0)
    with pytest.raises(OSError, match="timed out; run it again to go on"):
        fetch(server, file, timeout=0.1, tries=2)
    server.files["/a.zip"] = ZIP, ("broken", 9, 0)
    with pytest.raises(OSError, match="503"):
        fetch(server, file)
    with pytest.raises(OSError, match="refused"):
        download.fetch("http://127.0.0.1:1/a.zip", file, wait=0)
    assert not file.exists()
    server.files.clear()
    with pytest.raises(OSError, match="404"):
        download.download("cgqa", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "body, words",
    [
        (b"\n<!DOCTYPE html><title>Sign in</title>", "an HTML page, not an archive"),
        (b"GIF89a", "a file that begins b'GIF89a'"),
        (b"", "begins b''"),
    ],
)
def test_what_is_no_archive(server, tmp_path, body, words):
    server.files["/a.zip"] = body, None
    with pytest.raises(ValueError, match=words):
        fetch(server, tmp_path / "a.zip")
    assert not tree(tmp_path)


def test_full_disk(server, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    server.files["/cgqa.zip"] = zipped(layout()), None
    size = len(server.files["/cgqa.zip"][0])
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage(0, 0, 2 * size - 1))
    with pytest.raises(OSError, match="MB are needed"):
        download.download("cgqa", tmp_path)
    assert not tree(tmp_path)
    (tmp_path / "cgqa/cgqa.zip").write_bytes(zipped(layout()))
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage(0, 0, 100))
    with pytest.raises(OSError, match="MB are needed"):
        download.download("cgqa", tmp_path)
    assert list(tree(tmp_path)) == ["cgqa/cgqa.zip"]


def test_nothing_leaves_the_folder(server, tmp_path):
    evil = [("../../evil.jpg", LABELS[0][1], *LABELS[0][2:]), *LABELS[1:]]
    server.files["/compositional_split_natural.tar.gz"] = (
        tarred(below("ut-zap50k", layout(evil))),
        None,
    )
    server.files["/ut-zap50k-images.zip"] = zipped({inside: b"" for _, inside, *_ in LABELS}), None
    with pytest.raises(
        ValueError, match=re.escape("names outside the folder (images/../../evil.jpg)")
    ):
        download.download("utzappos", tmp_path / "root")
    for name in "images/../../evil.jpg", "images/..\\evil.jpg", "../evil.jpg", "/evil.jpg":
        server.files["/cgqa.zip"] = zipped({**layout(), name: b"evil"}), None
        try:
            download.download("cgqa", tmp_path / "root")
        except ValueError as error:
            assert "outside" in str(error)
            (tmp_path / "root/cgqa/cgqa.zip").unlink()
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name or path.is_symlink()]


def test_links_are_not_unpacked(tmp_path):
    files = {"a/" + name: content for name, content in layout().items()}
    (tmp_path / "a.tar.gz").write_bytes(
        tarred(files, **{"a/images/link.jpg": "/etc/passwd", "a/images": "/tmp"})
    )
    info = zipfile.ZipInfo("a/images/link.jpg")
    info.external_attr = 0o120777 << 16
    (tmp_path / "a.zip").write_bytes(zipped({**files, info: "/etc/passwd"}))
    for archive in "a.tar.gz", "a.zip":
        (tmp_path / f"{archive} out").mkdir()
        download.unpack(tmp_path / archive, tmp_path / f"{archive} out", download.plan_layout)
        assert tree(tmp_path / f"{archive} out") == layout()


@pytest.mark.parametrize(
    "harm", [lambda body: body[:-400], lambda body: body[:300] + bytes(200) + body[500:]]
)
@pytest.mark.parametrize("make", [zipped, tarred])
def test_damaged_archives_leave_nothing(tmp_path, harm, make):
    noise = random.Random(0).randbytes(5000)
    archive = tmp_path / "a.bin"
    archive.write_bytes(harm(make({data.SPLIT + "/train_pairs.txt": noise, "images/1.jpg": noise})))
    with pytest.raises(ValueError, match="was damaged .* run it again"):
        download.unpack(archive, tmp_path, download.plan_layout)
    assert not list(tmp_path.iterdir())


def test_an_archive_of_something_else(tmp_path):
    (tmp_path / "a.zip").write_bytes(zipped({"letters/1.txt": b"x"}))
    for plan in download.plan_layout, download.plan_mitstates:
        with pytest.raises(ValueError, match="holds only letters/1.txt: nothing was unpacked"):
            download.unpack(tmp_path / "a.zip", tmp_path, plan)
    assert list(tree(tmp_path)) == ["a.zip"]


def encrypted(archive, name):
    """The zip file's bytes with one member marked as encrypted, in both of its headers."""
    body = bytearray(archive)
    for signature, flag, start in (b"PK\x03\x04", 6, 30), (b"PK\x01\x02", 8, 46):
        place = body.find(signature)
        while place >= 0:
            if body[place + start :].startswith(name.encode()):
                body[place + flag] |= 1
            place = body.find(signature, place + 1)
    return bytes(body)


def of_method(archive, name, method):
    """The zip file's bytes with one member said to be packed by another method, in both headers."""
    body = bytearray(archive)
    for signature, field, start in (b"PK\x03\x04", 8, 30), (b"PK\x01\x02", 10, 46):
        place = body.find(signature)
        while place >= 0:
            if body[place + start :].startswith(name.encode()):
                body[place + field : place + field + 2] = method.to_bytes(2, "little")
            place = body.find(signature, place + 1)
    return bytes(body)


def test_a_member_that_cannot_be_opened_is_named_and_the_archive_stays(tmp_path):
    whole = zipped({**layout(), "images/1.jpg": b"1"})
    for body in encrypted(whole, "images/1.jpg"), of_method(whole, "images/1.jpg", 97):
        (tmp_path / "a.zip").write_bytes(body)
        with pytest.raises(ValueError, match="images/1.jpg is encrypted or .* another program"):
            download.unpack(tmp_path / "a.zip", tmp_path, download.plan_layout)
        assert tree(tmp_path) == {"a.zip": body}


@pytest.mark.parametrize("moves", range(5))
def test_a_kill_between_the_moves_is_made_good_by_the_next_run(
    server, tmp_path, monkeypatch, moves
):
    """Killed after so many moves, with nothing cleared up; the next run needs no server."""
    files = {**layout(), "images/1.jpg": b"1", "images/2.jpg": b"2"}
    server.files["/cgqa.zip"] = zipped(files), None
    replace, moved = download.os.replace, []

    def killed(source, target):
        if "unpacked" in str(source):
            if len(moved) == moves:
                raise KeyboardInterrupt
            moved.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(download.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            download.download("cgqa", tmp_path)
    server.asked.clear()
    download.download("cgqa", tmp_path)
    assert tree(tmp_path) == below("cgqa", files) and server.asked == []
    assert download.download("cgqa", tmp_path) == []


def test_without_a_connection_it_says_what_to_put_where(tmp_path, monkeypatch, capsys):
    addresses = {
        name: f"http://127.0.0.1:1/{url.rpartition('/')[2]}"
        for name, url in download.ADDRESSES.items()
    }
    monkeypatch.setattr(download, "ADDRESSES", addresses)
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as end:
        download.main(["utzappos", "--data-root", str(tmp_path), "--vectors", "word2vec", "glove"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "without a connection here, fetch elsewhere" in said
    for source, place in [
        ("splits", "ut-zap50k/compositional_split_natural.tar.gz"),
        ("utzappos", "ut-zap50k/ut-zap50k-images.zip"),
        ("word2vec", "w2v/GoogleNews-vectors-negative300.bin.gz"),
        ("glove", "glove/glove.6B.zip"),
    ]:
        assert f"  {addresses[source]}\n    as {tmp_path / place}\n" in said
    assert not tree(tmp_path)


def test_the_script_says_what_came_and_refuses_what_it_does_not_know(server, tmp_path, capsys):
    server.files["/glove.6B.zip"] = zipped({"glove.6B.300d.txt": b"300"}), None
    download.main(["--vectors", "glove", "--data-root", str(tmp_path)])
    assert capsys.readouterr().out == "fetched glove\n"
    for arguments in ["shapes"], ["fashion"], []:
        with pytest.raises(SystemExit):
            download.main([*arguments, "--data-root", str(tmp_path)])
        assert "only utzappos, mitstates, cgqa can be downloaded" in capsys.readouterr().err


def test_a_command_that_names_nothing_says_so(capsys):
    with pytest.raises(SystemExit):
        download.main([])
    assert capsys.readouterr().err.startswith("error: nothing is named: only utzappos, mitstates")
