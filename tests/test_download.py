"""Tests of lab/download.py against a server on this machine, which sends small archives like the
published ones, and fails in the ways that servers do."""

import contextlib
import gzip
import io
import itertools
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
     "val"),
    ("Suede_Shoes.Flats/3.jpg", "Shoes/Flats/Børn/3.jpg", "Suede", "Shoes.Flats", "test"),
]


class Handler(BaseHTTPRequestHandler):
    """A handler that sends server.files[path], each time with the next of server.faults.

    A fault is an HTTP status, "cut" (after 1,000,000 bytes), "stall" (for 1 s), or "no length".
    """

    def do_GET(self):
        fault = next(self.server.faults, "")
        if fault.isdigit():
            self.send_error(int(fault))
            return
        body = self.server.files[self.path]
        self.send_response(200)
        if fault != "no length":
            self.send_header("Content-Length", len(body))
        self.end_headers()
        if fault == "cut":
            body = body[:1_000_000]
        if fault == "stall":
            time.sleep(1)
        with contextlib.suppress(OSError):  # the client has left
            self.wfile.write(body)


@pytest.fixture
def server(monkeypatch):
    """Yield the server that all URLs lead to, with a short timeout and no pauses."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files = {}
        server.faults = iter([])
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        server.url = f"http://127.0.0.1:{server.server_port}"
        urls = {name: f"{server.url}/{Path(url).name}" for name, url in download.URLS.items()}
        monkeypatch.setattr(download, "URLS", urls)
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


def tarred(files):
    """Return the bytes of a tar.gz file from {name: bytes}, to which a link is added."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("images/link.jpg")
        link.type = tarfile.SYMTYPE
        link.linkname = "1.jpg"
        archive.addfile(link)
    return out.getvalue()


def layout():
    """Return the lists and metadata of a dataset as in the splits archive: {name: bytes}."""
    out = io.BytesIO()
    rows = [dict(zip(("image", "_image", "attr", "obj", "set"), row)) for row in LABELS]
    torch.save(rows, out)
    lists = {f"{data.SPLIT}/{phase}_pairs.txt": PAIRS for phase in data.PHASES}
    return {**lists, data.METADATA: out.getvalue()}


def below(folder, files):
    """Return the same files with a folder before their names."""
    return {f"{folder}/{name}": content for name, content in files.items()}


def tree(folder):
    """Return all files below a folder, also hidden ones: {relative name: bytes}."""
    return {path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}


ZIP = zipped({"a.bin": bytes(3_000_000)})
CGQA = {**layout(), "images/1.jpg": b"1", "images/2.jpg": b"2"}
EVIL = {**CGQA, "images/../../../evil.jpg": b"3"}


# ---- small copies of the published archives ------------------------------------------------------


def test_utzappos(server, tmp_path):
    """One file of the archive has a garbled path but a unique name."""
    wanted = {image: image.encode() for image, *_ in LABELS}
    photos = {f"x/{inside.replace('ø', '?')}": wanted[image] for image, inside, *_ in LABELS}
    server.files["/compositional_split_natural.tar.gz"] = tarred(
        {**below("states", layout()), **below("ut-zap50k", layout())})
    server.files["/ut-zap50k-images.zip"] = zipped(photos)
    download.main(["utzappos", "--data-root", str(tmp_path)])
    assert tree(tmp_path) == below("ut-zap50k", layout() | below("images", wanted))


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
    packed = gzip.compress(b"w2v")
    server.files["/GoogleNews-vectors-negative300.bin.gz"] = packed
    server.files["/glove.6B.zip"] = zipped({"glove.6B.50d.txt": b"50", "glove.6B.300d.txt": b"300"})
    download.download("own", tmp_path, ["word2vec", "glove"])
    assert tree(tmp_path) == {"w2v/GoogleNews-vectors-negative300.bin.gz": packed,
                              "glove/glove.6B.300d.txt": b"300"}
    server.files.clear()  # what exists is not downloaded again
    download.download("own", tmp_path, ["word2vec", "glove"])


# ---- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("faults, retries", [
    (["", "cut"], 1),  # each try sends two requests, and the first one reads the size alone
    (["", "stall"], 1),
    (["no length"], 0),
    (["503", "429", "", "500"], 3),
])
def test_passing_faults_are_retried(server, tmp_path, capsys, faults, retries):
    server.files["/a.zip"] = ZIP
    server.faults = iter(faults)
    download.fetch(f"{server.url}/a.zip", tmp_path / "a.zip")
    assert tree(tmp_path) == {"a.zip": ZIP}
    assert capsys.readouterr().err.count("; trying again in 0 s\n") == retries
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("fault, body, retries, said", [
    ("404", ZIP, 0, "HTTP Error 404"),
    ("503", ZIP, 4, "HTTP Error 503"),
    ("", b"\n<!DOCTYPE html>", 0, "sent a web page or XML instead of an archive"),
])
def test_failures_name_the_url_and_its_file(server, tmp_path, capsys, fault, body, retries, said):
    server.files["/glove.6B.zip"] = body
    server.faults = itertools.repeat(fault)
    line = f"^{server.url}/glove.6B.zip.* {said}.* as {tmp_path}/glove/glove.6B.zip$"
    with pytest.raises((OSError, ValueError), match=line):
        download.download("own", tmp_path, ["glove"])
    assert capsys.readouterr().err.count("; trying again in 0 s\n") == retries
    assert not tree(tmp_path)


def test_nothing_to_download():
    with pytest.raises(ValueError, match="nothing to download: name a dataset"):
        download.download("shapes")


# ---- unpacking -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [zipped(EVIL), tarred(EVIL), tarred(CGQA)])
def test_nothing_leaves_the_folder_and_links_are_dropped(tmp_path, content):
    archive = tmp_path / "cgqa/a.zip"
    archive.parent.mkdir()
    archive.write_bytes(content)
    with contextlib.suppress(ValueError):
        download.unpack(archive, download.find_layout)
    for path in tmp_path.rglob("*.jpg"):
        assert path.is_relative_to(archive.parent) and not path.is_symlink()


def test_no_place_that_the_metadata_name_leads_out(tmp_path):
    (tmp_path / "a.zip").write_bytes(zipped(CGQA))
    with pytest.raises(ValueError, match="images/../../evil.jpg leads out of"):
        download.unpack(tmp_path / "a.zip",
                        lambda stage: {"images/../../evil.jpg": stage / "images/1.jpg"})


@pytest.mark.parametrize("make", [zipped, tarred])
def test_damaged_and_other_archives_leave_nothing(tmp_path, make):
    noise = random.Random(0).randbytes(5000)
    whole = make({data.SPLIT + "/train_pairs.txt": noise, "images/1.jpg": noise})
    other = make({"letters/1.txt": b"x"})
    for content in (whole[:-400], whole[:300] + bytes(200) + whole[500:], other):
        (tmp_path / "a.bin").write_bytes(content)
        with pytest.raises(ValueError, match="a.bin (cannot be used|is another archive)"):
            download.unpack(tmp_path / "a.bin", download.find_layout)
        assert list(tree(tmp_path)) == ["a.bin"]


def test_an_archive_that_is_there_is_unpacked(tmp_path):
    """A run leaves this if it is killed while it moves the files to their places."""
    folder = tmp_path / "cgqa"
    for path in ("images/1.jpg", ".cgqa.zip.unpacked.part/images/2.jpg"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_bytes(b"")
    (folder / "cgqa.zip").write_bytes(zipped(below("some/where", CGQA)))
    download.download("cgqa", tmp_path)
    assert tree(tmp_path) == below("cgqa", CGQA)
