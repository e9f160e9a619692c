"""Tests of download.py against a server on this machine: what the true addresses give, in small,
and what can fail."""

import contextlib
import gzip
import io
import random
import tarfile
import threading
import time
import types
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import data
import download

PAIRS = {
    "train": "Suede Boots.Ankle\nFaux.Fur Shoes.Flats",
    "val": "Suede Boots.Ankle",
    "test": "Suede Shoes.Flats",
}
LABELS = [
    ("Suede_Boots.Ankle/1.9.jpg", "Shoes/Ankle & Co./L.A. Gear/1.9.jpg", "Suede", "Boots.Ankle",
     "train"),
    ("Faux.Fur_Shoes.Flats/1.9.jpg", "Shoes/Flats/L.A. Gear/1.9.jpg", "Faux.Fur", "Shoes.Flats",
     "train"),
    ("Suede_Boots.Ankle/2.jpg", "Shoes/Ankle & Co./2.jpg", "Suede", "Boots.Ankle", "val"),
    ("Suede_Shoes.Flats/3.jpg", "Shoes/Flats/Børn/3.jpg", "Suede", "Shoes.Flats", "test"),
]


class Handler(BaseHTTPRequestHandler):
    """Serves server.files[path], with server.fault for as many answers as server.faults says; a cut
    answer and one that stalls end after server.after bytes. Logs the first byte asked for."""

    def do_GET(self):
        """Answer."""
        server = self.server
        body = server.files.get(self.path)
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        server.asked.append(start)
        fault = server.fault if server.faults > 0 else ""
        server.faults -= 1
        if body is None or fault == "broken":
            self.send_error(404 if body is None else 503)
            return
        if fault == "no ranges" or "Range" not in self.headers:
            start = 0
            self.send_response(200)
        else:
            start -= 7 * (fault == "other range")
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if fault != "no length":
            self.send_header("Content-Length", len(body) - start)
        self.send_header("ETag", server.version)
        self.end_headers()
        try:
            if fault in ("cut", "stall"):
                self.wfile.write(body[start:start + server.after])
                time.sleep(fault == "stall")
            else:
                self.wfile.write(body[start:])
        except OSError:  # who asked has left
            pass

    def log_message(self, *arguments):
        """Quiet."""


@pytest.fixture
def server(monkeypatch):
    """The server, with every address of the table turned to it, and without waiting."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = {}
    server.asked = []
    server.version = "1"
    server.fault = ""
    server.faults = 0
    server.after = 1_000_000
    serving = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    serving.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    turned = {name: f"{server.url}/{url.rpartition('/')[2]}"
              for name, url in download.ADDRESSES.items()}
    monkeypatch.setattr(download, "ADDRESSES", turned)
    options = download.fetch.__kwdefaults__ | {"wait": 0, "timeout": 0.5}
    monkeypatch.setattr(download.fetch, "__kwdefaults__", options)
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
            info.type = tarfile.SYMTYPE
            info.linkname = target
            archive.addfile(info)
    return out.getvalue()


def layout(labels=LABELS, old=False):
    """Lists and metadata as the splits archive holds them below a dataset's folder."""
    out = io.BytesIO()
    rows = [dict(zip(("image", "_image", "attr", "obj", "set"), row)) for row in labels]
    torch.save(rows, out, _use_new_zipfile_serialization=not old)
    lists = {f"{data.SPLIT}/{phase}_pairs.txt": pairs.encode() for phase, pairs in PAIRS.items()}
    return {**lists, data.METADATA: out.getvalue()}


def below(folder, files):
    """The same files below a folder."""
    return {f"{folder}/{name}": content for name, content in files.items()}


def tree(folder):
    """All files below a folder, hidden ones too: relative name -> bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


ZIP = zipped({f"{i}.bin": bytes(range(256)) * 4000 for i in range(3)})  # 3 MB
CGQA = {**layout(), "images/1.jpg": b"1", "images/2.jpg": b"2"}


# ---- what is published, in small -----------------------------------------------------------------


def test_utzappos(server, tmp_path, capsys):
    """Also with a file's name garbled, if it is the only one of this name, and other files."""
    wanted = {image: image.encode() for image, *_ in LABELS}
    photos = {inside.replace("ø", "?"): wanted[image] for image, inside, *_ in LABELS}
    photos = below("ut-zap50k-images", {**photos, "Shoes/Flats/99.jpg": b""})
    splits = {**below("states", layout()), **below("ut-zap50k", layout(old=True))}
    server.files["/compositional_split_natural.tar.gz"] = tarred(splits)
    server.files["/ut-zap50k-images.zip"] = zipped(photos)
    download.main(["utzappos", "--data-root", str(tmp_path)])
    assert capsys.readouterr().out.startswith("fetched splits, utzappos; all of it is in ")
    assert tree(tmp_path) == below("ut-zap50k", {**layout(old=True), **below("images", wanted)})
    dataset = data.load("utzappos", tmp_path)
    assert len(dataset.every_image) == 4 and not data.missing_photos(dataset)
    server.files.clear()
    download.main(["utzappos", "--data-root", str(tmp_path)])
    assert "fetched nothing" in capsys.readouterr().out


def test_mitstates(server, tmp_path):
    splits = below("./mit-states", layout())
    server.files["/compositional_split_natural.tar.gz"] = tarred(splits)
    server.files["/release_dataset.zip"] = zipped({
        "release_dataset/images/wet old dog/1 a.jpg": b"1",
        "release_dataset/images/adj cat/2.jpg": b"2",
        "release_dataset/README.txt": b"",
        "__MACOSX/release_dataset/images/._x": b"",
    })
    download.download("mitstates", tmp_path)
    photos = {"images/wet_old_dog/1 a.jpg": b"1", "images/adj_cat/2.jpg": b"2"}
    assert tree(tmp_path) == below("mit-states", {**layout(), **photos})


@pytest.mark.parametrize("top", ["", "cgqa/", "some/where/"])
def test_cgqa(server, tmp_path, top):
    files = {top + name: content for name, content in CGQA.items()}
    server.files["/cgqa.zip"] = zipped({"notes.txt": b"x", **files})
    assert download.download("cgqa", tmp_path) == ["cgqa"]
    assert tree(tmp_path) == below("cgqa", CGQA)


def test_vectors(server, tmp_path):
    sources = ["word2vec", "fasttext", "glove"]
    server.files["/GoogleNews-vectors-negative300.bin.gz"] = gzip.compress(b"w2v")
    server.files["/cc.en.300.bin.gz"] = gzip.compress(b"fast")
    server.files["/glove.6B.zip"] = zipped({"glove.6B.50d.txt": b"50", "glove.6B.300d.txt": b"300"})
    assert download.download("own", tmp_path, sources) == sources
    packed = tmp_path / "w2v/GoogleNews-vectors-negative300.bin.gz"
    assert gzip.decompress(packed.read_bytes()) == b"w2v"
    assert (tmp_path / "glove/glove.6B.300d.txt").read_bytes() == b"300"
    assert len(tree(tmp_path)) == 3
    packed.rename(packed.with_suffix(""))
    assert download.download("own", tmp_path, sources) == []


# ---- connections ---------------------------------------------------------------------------------


def test_cut_connections_are_resumed_unless_the_file_has_changed(server, tmp_path):
    server.files["/a.zip"] = ZIP
    file = tmp_path / "a.zip"
    server.fault = "cut"
    server.faults = 4  # of two requests a try, one of which is for the headers alone
    download.fetch(f"{server.url}/a.zip", file)
    assert tree(tmp_path) == {"a.zip": ZIP}
    assert server.asked == [0, 0, 0, 1_000_000, 0, 2_000_000]
    for version, start in (("1", 1_000_000), ("2", 0)):
        file.unlink()
        server.faults = 2
        with pytest.raises(OSError, match="ended after 1,000,000 of 3,072,.* run it again to go"):
            download.fetch(f"{server.url}/a.zip", file, tries=1)
        assert not file.exists()
        server.version = version
        server.asked.clear()
        download.fetch(f"{server.url}/a.zip", file)
        assert file.read_bytes() == ZIP and server.asked == [0, start]


@pytest.mark.parametrize("fault, faults", [
    ("no ranges", 9), ("no length", 9), ("broken", 3), ("stall", 2), ("other range", 4)])
def test_servers_without_ranges_or_lengths_or_patience(server, tmp_path, fault, faults):
    server.files["/a.zip"] = ZIP
    server.fault = "cut"
    server.faults = 2
    with pytest.raises(OSError, match="run it again"):
        download.fetch(f"{server.url}/a.zip", tmp_path / "a.zip", tries=1)
    server.fault = fault
    server.faults = faults
    download.fetch(f"{server.url}/a.zip", tmp_path / "a.zip")
    assert (tmp_path / "a.zip").read_bytes() == ZIP


@pytest.mark.parametrize("body, fault, said", [
    (None, "", "HTTP Error 404"),
    (ZIP, "broken", "HTTP Error 503"),
    (ZIP, "stall", "timed out"),
    (b"\n<!DOCTYPE html><title>Sign in</title>", "", "no archive .it begins b'.n<!DOC"),
    (b"", "", "no archive"),
])
def test_failures_name_the_address_and_its_place(server, tmp_path, body, fault, said):
    if body is not None:
        server.files["/glove.6B.zip"] = body
    server.fault = fault
    server.faults = 99
    server.after = 0
    with pytest.raises((OSError, ValueError), match=said) as error:
        download.download(None, tmp_path, ["glove"])
    assert f"{server.url}/glove.6B.zip" in str(error.value)
    assert f"as {tmp_path / 'glove/glove.6B.zip'}" in str(error.value)
    assert len(server.asked) == 1 or said != "HTTP Error 404"  # no use to try again
    assert set(tree(tmp_path).values()) <= {b""}


def test_room_is_asked_for_first(server, tmp_path, monkeypatch):
    server.files["/cgqa.zip"] = zipped(CGQA)
    size = len(server.files["/cgqa.zip"])
    for free in (2 * size - 1, 100):  # too little for archive and content, then for the content
        usage = types.SimpleNamespace(free=free)
        monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(OSError, match="bytes are needed"):
            download.download("cgqa", tmp_path)
        assert set(tree(tmp_path)) <= {"cgqa/cgqa.zip"}
        (tmp_path / "cgqa/cgqa.zip").write_bytes(server.files["/cgqa.zip"])


def test_the_script_refuses_what_it_does_not_know(tmp_path, capsys):
    for arguments in (["shapes"], []):
        with pytest.raises(SystemExit) as end:
            download.main([*arguments, "--data-root", str(tmp_path)])
        assert end.value.code == 2
        assert "only utzappos, mitstates, cgqa can be downloaded" in capsys.readouterr().err


# ---- unpacking -----------------------------------------------------------------------------------


def test_nothing_leaves_the_folder(server, tmp_path):
    evil = [("../../evil.jpg", *LABELS[0][1:]), *LABELS[1:]]
    server.files["/compositional_split_natural.tar.gz"] = tarred(below("ut-zap50k", layout(evil)))
    server.files["/ut-zap50k-images.zip"] = zipped({inside: b"" for _, inside, *_ in LABELS})
    with pytest.raises(ValueError, match="images/../../evil.jpg leads out of"):
        download.download("utzappos", tmp_path / "root")
    archives = [tarred(CGQA, **{"images/link.jpg": "../../../outside.jpg"}),
                tarred(CGQA, **{"images/link.jpg": "1.jpg"})]
    for name in ("images/../../evil.jpg", "../evil.jpg", "/evil.jpg"):
        archives += [zipped({**CGQA, name: b""}), tarred({**CGQA, name: b""})]
    for content in archives:
        (tmp_path / "a.zip").write_bytes(content)
        with contextlib.suppress(ValueError):
            download.unpack(tmp_path / "a.zip", tmp_path / "root/cgqa", download.find_layout)
    assert set(CGQA) <= set(tree(tmp_path / "root/cgqa"))
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]
    assert {path.parent.name for path in tmp_path.rglob("evil.jpg")} <= {"images"}


@pytest.mark.parametrize("make", [zipped, tarred])
def test_damaged_and_other_archives_leave_nothing(tmp_path, make):
    noise = random.Random(0).randbytes(5000)
    whole = make({data.SPLIT + "/train_pairs.txt": noise, "images/1.jpg": noise})
    for body, said in ((whole[:-400], "cannot be unpacked"),
                       (whole[:300] + bytes(200) + whole[500:], "cannot be unpacked"),
                       (make({"letters/1.txt": b"x"}), "is not the archive meant")):
        (tmp_path / "a.bin").write_bytes(body)
        with pytest.raises(ValueError, match=f"a.bin {said}"):
            download.unpack(tmp_path / "a.bin", tmp_path, download.find_layout)
        assert list(tree(tmp_path)) == ["a.bin"]


@pytest.mark.parametrize("moves", range(6))
def test_a_kill_between_the_moves_is_made_good_by_the_next_run(
        server, tmp_path, monkeypatch, moves):
    """Killed after so many moves, with nothing cleared up; the next run needs no server."""
    server.files["/cgqa.zip"] = zipped(CGQA)
    replace = download.os.replace
    moved = []

    def killed(source, target):
        if "unpacked" in str(source):
            if len(moved) == moves:
                raise KeyboardInterrupt
            moved.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(download.os, "replace", killed)
        patch.setattr(download.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            download.download("cgqa", tmp_path)
    server.files.clear()
    assert download.download("cgqa", tmp_path) == ["cgqa"]
    assert tree(tmp_path) == below("cgqa", CGQA)
    assert download.download("cgqa", tmp_path) == []
