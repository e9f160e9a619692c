"""Tests of lab/download.py against a server on this machine, which sends small archives like the
published ones, and fails in the ways that servers do."""

import contextlib
import gzip
import io
import random
import socket
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import data
from lab import download

PAIRS = b"Suede Boots.Ankle\nFaux.Fur Shoes.Flats\nSuede Shoes.Flats"  # of each list
LABELS = [
    ("Suede_Boots.Ankle/1.9.jpg", "Shoes/Ankle & Co./L.A. Gear/1.9.jpg", "Suede", "Boots.Ankle",
     "train"),
    ("Faux.Fur_Shoes.Flats/1.9.jpg", "Shoes/Flats/L.A. Gear/1.9.jpg", "Faux.Fur", "Shoes.Flats",
     "train"),
    ("Suede_Boots.Ankle/2.jpg", "Shoes/Ankle & Co./2.jpg", "Suede", "Boots.Ankle", "val"),
    ("Suede_Shoes.Flats/3.jpg", "Shoes/Flats/Børn/3.jpg", "Suede", "Shoes.Flats", "test"),
]


class Handler(BaseHTTPRequestHandler):
    """A handler that sends server.files[path], each time with the next of server.faults.

    A fault is an HTTP status, "cut" or "stall" (after 1,000,000 bytes), or "no length".
    """

    def do_GET(self):
        body = self.server.files.get(self.path)
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if body is None or fault.isdigit():
            self.send_error(int(fault or 404))
            return
        self.send_response(200)
        if fault != "no length":
            self.send_header("Content-Length", len(body))
        self.end_headers()
        if fault in ("cut", "stall"):
            body = body[:1_000_000]
        with contextlib.suppress(OSError):  # the client has left
            self.wfile.write(body)
        if fault == "stall":
            time.sleep(1)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    """Yield the server that all URLs lead to, with a short timeout and no pauses."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files = {}
        server.faults = []
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        server.url = f"http://127.0.0.1:{server.server_port}"
        for name, url in download.URLS.items():
            monkeypatch.setitem(download.URLS, name, f"{server.url}/{Path(url).name}")
        monkeypatch.setattr(download, "TIMEOUT", 0.5)
        monkeypatch.setattr(download, "PAUSES", (0, 0, 0, 0, None))
        yield server
        server.shutdown()


def zipped(files):
    """Return the bytes of a zip file from {name: bytes}."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(files, link=None):
    """Return the bytes of a tar.gz file from {name: bytes}, with a link in images/ if given."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if link is not None:
            info = tarfile.TarInfo("images/link.jpg")
            info.type = tarfile.SYMTYPE
            info.linkname = link
            archive.addfile(info)
    return out.getvalue()


def layout(old=False):
    """Return the lists and metadata of a dataset as in the splits archive: {name: bytes}."""
    out = io.BytesIO()
    rows = [dict(zip(("image", "_image", "attr", "obj", "set"), row)) for row in LABELS]
    torch.save(rows, out, _use_new_zipfile_serialization=not old)
    lists = {f"{data.SPLIT}/{phase}_pairs.txt": PAIRS for phase in data.PHASES}
    return {**lists, data.METADATA: out.getvalue()}


def below(folder, files):
    """Return the same files with a folder before their names."""
    return {f"{folder}/{name}": content for name, content in files.items()}


def tree(folder):
    """Return all files below a folder, also hidden ones: {relative name: bytes}."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


ZIP = zipped({f"{i}.bin": bytes(range(256)) * 4000 for i in range(3)})  # 3 MB
CGQA = {**layout(), "images/1.jpg": b"1", "images/2.jpg": b"2"}


# ---- small copies of the published archives ------------------------------------------------------


def test_utzappos(server, tmp_path, capsys):
    """The archive also has a file with a garbled path but a unique name, and further files."""
    wanted = {image: image.encode() for image, *_ in LABELS}
    photos = {f"x/{inside.replace('ø', '?')}": wanted[image] for image, inside, *_ in LABELS}
    server.files["/compositional_split_natural.tar.gz"] = tarred(
        {**below("states", layout()), **below("ut-zap50k", layout(old=True))})
    server.files["/ut-zap50k-images.zip"] = zipped({**photos, "x/Shoes/99.jpg": b""})
    download.main(["utzappos", "--data-root", str(tmp_path)])
    assert capsys.readouterr().out == f"all files are in {tmp_path}\n"
    assert tree(tmp_path) == below("ut-zap50k", layout(old=True) | below("images", wanted))
    assert len(data.load("utzappos", tmp_path).every_image) == 4


def test_mitstates(server, tmp_path):
    splits = below("./mit-states", layout())
    server.files["/compositional_split_natural.tar.gz"] = tarred(splits)
    server.files["/release_dataset.zip"] = zipped({
        "release_dataset/images/wet old dog/1 a.jpg": b"1",
        "release_dataset/images/adj cat/2.jpg": b"2",
        "__MACOSX/release_dataset/images/._x": b"",
    })
    download.download("mitstates", tmp_path)
    photos = {"images/wet_old_dog/1 a.jpg": b"1", "images/adj_cat/2.jpg": b"2"}
    assert tree(tmp_path) == below("mit-states", {**layout(), **photos})


def test_vectors(server, tmp_path):
    sources = ["word2vec", "fasttext", "glove"]
    server.files["/GoogleNews-vectors-negative300.bin.gz"] = gzip.compress(b"w2v")
    server.files["/cc.en.300.bin.gz"] = gzip.compress(b"fast")
    server.files["/glove.6B.zip"] = zipped({"glove.6B.50d.txt": b"50", "glove.6B.300d.txt": b"300"})
    download.download("own", tmp_path, sources)
    packed = tmp_path / "w2v/GoogleNews-vectors-negative300.bin.gz"
    assert gzip.decompress(packed.read_bytes()) == b"w2v"
    assert (tmp_path / "glove/glove.6B.300d.txt").read_bytes() == b"300"
    assert len(tree(tmp_path)) == 3
    packed.rename(packed.with_suffix(""))
    server.files.clear()  # what exists is not downloaded again
    download.download("own", tmp_path, sources)


# ---- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("faults, retries", [
    (["", "cut"], 1),  # each try sends two requests, and the first one reads the size alone
    (["", "stall"], 1),
    (["no length", "no length"], 0),
    (["503", "429", "", "500"], 3),
    (["502"] * 4, 4),
])
def test_passing_faults_are_retried(server, tmp_path, capsys, faults, retries):
    server.files["/a.zip"] = ZIP
    server.faults = faults
    download.fetch(f"{server.url}/a.zip", tmp_path / "a.zip")
    assert tree(tmp_path) == {"a.zip": ZIP}
    assert capsys.readouterr().err.count("; trying again in 0 s\n") == retries
    assert socket.getdefaulttimeout() is None and not faults


@pytest.mark.parametrize("fault, body, retries, said", [
    ("404", ZIP, 0, "HTTP Error 404"),
    ("503", ZIP, 4, "HTTP Error 503"),
    ("", b"\n<!DOCTYPE html>", 0, "sent a web page or XML instead of an archive"),
])
def test_failures_name_the_url_and_its_file(server, tmp_path, capsys, fault, body, retries, said):
    server.files["/glove.6B.zip"] = body
    server.faults = [fault] * 9
    with pytest.raises(SystemExit):
        download.main(["--vectors", "glove", "--data-root", str(tmp_path)])
    printed = capsys.readouterr().err
    assert printed.count("; trying again in 0 s\n") == retries
    error = printed.splitlines()[-1]
    assert error.startswith(f"error: {server.url}/glove.6B.zip") and said in error
    assert f"as {tmp_path / 'glove/glove.6B.zip'}" in error
    assert not tree(tmp_path)


def test_nothing_to_download():
    with pytest.raises(ValueError, match="nothing to download: name a dataset"):
        download.download("shapes")


# ---- unpacking -----------------------------------------------------------------------------------


def test_nothing_leaves_the_folder(tmp_path):
    archive = tmp_path / "root/cgqa/a.zip"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(zipped(CGQA))
    with pytest.raises(ValueError, match="../evil.jpg leads out of"):  # as metadata may name it
        download.unpack(archive, lambda stage: {"../evil.jpg": stage / "images/1.jpg"})
    contents = [tarred(CGQA, "../../../outside.jpg"), tarred(CGQA, "1.jpg")]
    for name in ("images/../../evil.jpg", "/evil.jpg"):
        contents += [zipped({**CGQA, name: b""}), tarred({**CGQA, name: b""})]
    for content in contents:
        archive.write_bytes(content)
        with contextlib.suppress(ValueError):
            download.unpack(archive, download.find_layout)
    assert set(CGQA) <= set(tree(archive.parent))
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]
    assert all(path.is_relative_to(archive.parent) for path in tmp_path.rglob("*.jpg"))


@pytest.mark.parametrize("make", [zipped, tarred])
def test_damaged_and_other_archives_leave_nothing(tmp_path, make):
    noise = random.Random(0).randbytes(5000)
    whole = make({data.SPLIT + "/train_pairs.txt": noise, "images/1.jpg": noise})
    for body, said in ((whole[:-400], "cannot be used"),
                       (whole[:300] + bytes(200) + whole[500:], "cannot be used"),
                       (make({"letters/1.txt": b"x"}), "is another archive than expected")):
        (tmp_path / "a.bin").write_bytes(body)
        with pytest.raises(ValueError, match=f"a.bin {said}"):
            download.unpack(tmp_path / "a.bin", download.find_layout)
        assert list(tree(tmp_path)) == ["a.bin"]


@pytest.mark.parametrize("moves", range(6))
def test_the_next_run_completes_one_killed_between_the_moves(
        server, tmp_path, monkeypatch, moves):
    """The kill comes after some moves, and removes nothing."""
    server.files["/cgqa.zip"] = zipped({"notes.txt": b"x", **below("some/where", CGQA)})
    replace = download.os.replace
    moved = []

    def killed(source, target):
        if len(moved) == moves:
            raise KeyboardInterrupt
        moved.append(replace(source, target))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(download.os, "replace", killed)
        patch.setattr(download.shutil, "rmtree", lambda *_, **__: None)
        download.download("cgqa", tmp_path)
    server.files.clear()  # the next runs need none
    for _ in range(2):
        download.download("cgqa", tmp_path)
        assert tree(tmp_path) == below("cgqa", CGQA)
