"""A prepared corpus is the tokens of its source, whatever happened on the way; what was damaged is refused by name."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hypermlp.cli.prepare import run_prepare
from hypermlp.data import shards
from hypermlp.data.corpus import SPLITS, Corpus, TokenStream, open_corpus, read_corpus
from hypermlp.data.shards import UNFINISHED, ShardProgress, prepare
from hypermlp.data.text import Source, find_source
from hypermlp.data.tokenizers import ByteTokenizer, FileTokenizer, train_bpe
from hypermlp.errors import RunError
from hypermlp.files import LOCK, lock

SHARD = 4000  # bytes: a shard for each file of the source below


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six text files and 300 rows of JSON, 36 kB together."""
    root = tmp_path / "source"
    root.mkdir()
    for i in range(6):
        (root / f"{i}.txt").write_text("".join(f"file {i} line {j} é\n" for j in range(250)), encoding="utf-8")
    (root / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i} " + "x" * (i % 20)}) + "\n" for i in range(300)))
    return root


@pytest.fixture
def source(folder: Path) -> Source:
    return find_source(folder, validation=0.2)


def contents(out: Path) -> dict[str, bytes]:
    files = [path for path in out.rglob("*") if path.is_file() and path.name != LOCK]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def same(one: Corpus, two: Corpus) -> None:
    for name in SPLITS:
        a, b = one.split(name), two.split(name)
        assert len(a) == len(b) > 0
        assert np.array_equal(a.read(0, len(a)), b.read(0, len(b)))
        assert np.array_equal(a.ends, b.ends)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "four bytes"])
def test_a_prepared_corpus_equals_direct_tokenisation(kind: str, source: Source, tmp_path: Path) -> None:
    tokenizer: Any = ByteTokenizer()
    if kind != "bytes":
        tokenizer = train_bpe((d.text for d in source.documents()), 300)
    if kind == "four bytes":
        file = tokenizer.file
        file["added_tokens"].append({**file["added_tokens"][0], "id": 70000, "content": "<far>"})
        file["model"]["vocab"]["<far>"] = 70000
        tokenizer = FileTokenizer("far", file)
        assert tokenizer.dtype == "<u4"
    seen: list[ShardProgress] = []
    prepared = prepare(source, tmp_path / "out", tokenizer, shard=SHARD, progress=seen.append)
    assert len(prepared.split("train").pieces) > 3
    same(prepared, read_corpus(source, tokenizer))
    same(open_corpus(tmp_path / "out", verify=True), prepared)
    for validation, name in enumerate(SPLITS):
        tokens = prepared.split(name)
        bounds = zip([0, *tokens.ends[:-1].tolist()], tokens.ends.tolist(), strict=True)
        expected = [d.text for d in source.documents() if d.validation == validation]
        assert [tokenizer.decode(tokens.read(a, b)) for a, b in bounds] == expected
        assert (tokens.read(0, len(tokens))[tokens.ends - 1] == tokenizer.end).all()
    assert [p.read for p in seen] == sorted({p.read for p in seen})
    assert seen[-1][:2] == (source.size, source.size)
    assert seen[-1].documents == sum(len(prepared.split(name).ends) for name in SPLITS)
    assert seen[-1].tokens == sum(len(prepared.split(name)) for name in SPLITS)


def test_the_index_says_what_the_corpus_is(source: Source, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out", ByteTokenizer(), shard=SHARD, provenance={"commit": "abc"})
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["source"] == {"name": "source", "parts": 7, "bytes": source.size}
    assert index["tokenizer"] == {"name": "bytes", "vocabulary": 257, "end": 256, "fingerprint": ByteTokenizer().fingerprint}
    assert index["counts"]["train"]["documents"] + index["counts"]["validation"]["documents"] == 306
    assert index["provenance"] == {"commit": "abc"}
    assert sorted(contents(tmp_path / "out")) == sorted(
        ["index.json", "tokenizer.json", *(shard["file"] for name in SPLITS for shard in index["shards"][name])]
    )


def test_reading_crosses_pieces() -> None:
    tokens = TokenStream(
        [np.arange(3), np.arange(0), np.arange(3, 5), np.arange(5, 9)],
        [np.array([2]), np.array([]), np.array([1]), np.array([4])],
    )
    for start in range(10):
        for stop in range(start, 12):
            assert tokens.read(start, stop).tolist() == list(range(9))[start:stop]
    assert tokens.ends.tolist() == [2, 4, 9]


KILLED = """
import multiprocessing, os, sys
from pathlib import Path
from hypermlp.data.shards import prepare
from hypermlp.data.text import find_source
from hypermlp.data.tokenizers import ByteTokenizer

if __name__ == "__main__":
    folder, out = map(Path, sys.argv[1:])
    source = find_source(folder, validation=0.2)
    (folder / "3.txt").unlink()
    os.mkfifo(folder / "3.txt")  # whoever reads it waits for ever

    def tell(progress):
        finished = list(out.glob(".unfinished/0*.json"))
        print(len(finished), *(child.pid for child in multiprocessing.active_children()), flush=True)

    prepare(source, out, ByteTokenizer(), shard=4000, workers=2, progress=tell)
"""


def test_after_a_kill_the_same_call_goes_on_and_ends_the_same(folder: Path, source: Source, tmp_path: Path) -> None:
    out, script = tmp_path / "out", tmp_path / "killed.py"
    script.write_text(KILLED)
    content, stat = (folder / "3.txt").read_bytes(), (folder / "3.txt").stat()
    run = subprocess.Popen([sys.executable, str(script), str(folder), str(out)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    finished, workers = 0, []
    while finished < 3:
        finished, *workers = map(int, run.stdout.readline().split())
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)

    with pytest.raises(ValueError, match=r"holds no prepared corpus \(index.json is missing\).*run the unfinished command"):
        open_corpus(out)
    (folder / "3.txt").unlink()
    (folder / "3.txt").write_bytes(content)
    os.utime(folder / "3.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    records = [json.loads(path.read_text()) for path in out.glob(f"{UNFINISHED}/0*.json")]
    kept = [out / shard["file"] for record in records for shard in record.values()]
    before = {path: path.stat().st_mtime_ns for path in kept}
    seen: list[ShardProgress] = []
    prepare(source, out, ByteTokenizer(), shard=SHARD, progress=seen.append)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "finished shards are kept"
    prepare(source, tmp_path / "whole", ByteTokenizer(), shard=SHARD)
    assert contents(out) == contents(tmp_path / "whole")
    assert len(before) >= 3


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("when", [0.0, 0.1, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("what", ["os.fsync", "os.replace", "Shard.write"])
def test_a_full_disk_leaves_nothing_half_done(
    what: str, when: float, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = (shards.Shard if what == "Shard.write" else os), what.partition(".")[2]
    real, calls, last = getattr(owner, name), 0, 10**9

    def full(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > last:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        prepare(source, tmp_path / "whole", ByteTokenizer(), shard=SHARD)
        calls, last = 0, round(when * (calls - 1))
        with pytest.raises(OSError, match=r"no space left for .*out; make room and run the same command again") as caught:
            prepare(source, out, ByteTokenizer(), shard=SHARD)
        assert caught.value.errno == errno.ENOSPC
    left = contents(out)
    assert "index.json" not in left
    assert not [name for name in left if name.startswith(UNFINISHED) and not name.endswith(".json")], "temporary files"
    whole = contents(tmp_path / "whole")
    assert {name: data for name, data in left.items() if not name.startswith(UNFINISHED)}.items() <= whole.items()
    prepare(source, out, ByteTokenizer(), shard=SHARD)
    assert contents(out) == whole


def test_a_complete_corpus_is_not_made_again(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(source, tmp_path / "out", ByteTokenizer(), shard=SHARD)
    monkeypatch.setattr(shards, "tokenise", None)
    same(prepare(source, tmp_path / "out", ByteTokenizer(), shard=SHARD), first)


def test_a_folder_of_something_else_is_refused(folder: Path, source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(source, out, ByteTokenizer(), shard=SHARD)
    before = contents(out)
    (folder / "0.txt").write_text("changed")
    for changed, other in [
        ("source", find_source(folder, validation=0.2)),
        ("validation", find_source(folder, validation=0.3)),
    ]:
        with pytest.raises(ValueError, match=rf"out was begun with other settings: .*{changed}.* another folder"):
            prepare(other, out, ByteTokenizer(), shard=SHARD)
    with pytest.raises(ValueError, match=r"holds other files; give a new folder"):
        prepare(source, folder, ByteTokenizer())
    assert contents(out) == before


def damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_damage_is_refused_by_name(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypermlp.data.corpus.EDGE", 64)
    out = tmp_path / "out"
    prepare(source, out, ByteTokenizer(), shard=SHARD)
    path = out / json.loads((out / "index.json").read_text())["shards"]["train"][1]["file"]
    good = path.read_bytes()
    remedy = "remove the folder and prepare the corpus again"
    for place in (0, len(good) - 1):
        damage(path, place)
        with pytest.raises(ValueError, match=rf"{path.name} was altered after it was written; {remedy}"):
            open_corpus(out)
        path.write_bytes(good)
    damage(path, len(good) // 2)
    open_corpus(out)  # both ends are as they were: that is all a quick look sees
    with pytest.raises(ValueError, match=rf"{path.name} was altered"):
        open_corpus(out, verify=True)
    path.write_bytes(good[:-8])
    with pytest.raises(ValueError, match=rf"{path.name} has {len(good) - 8} bytes where {len(good)} were written; {remedy}"):
        open_corpus(out)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name} is missing; {remedy}"):
        open_corpus(out)
    path.write_bytes(good)
    train_bpe(["abc"], 257).save(out / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the one the corpus was made with"):
        open_corpus(out)
    (out / "index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        open_corpus(out)


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n')
    source = find_source(tmp_path / "a.jsonl")
    for make in (lambda: read_corpus(source), lambda: prepare(source, tmp_path / "out", ByteTokenizer())):
        with pytest.raises(ValueError, match=r"the corpus a\.jsonl holds no text"):
            make()
    assert contents(tmp_path / "out") == {}


def test_a_mistake_in_the_source_stops_the_work_and_its_correction_starts_afresh(folder: Path, tmp_path: Path) -> None:
    rows = folder / "rows.jsonl"
    good = rows.read_text()
    rows.write_text(good + "oops\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 301, is not JSON"):
        prepare(find_source(folder), tmp_path / "out", ByteTokenizer(), shard=SHARD)
    assert "index.json" not in contents(tmp_path / "out")
    rows.write_text(good)
    with pytest.raises(ValueError, match=r"out was begun with other settings: source was .* another folder"):
        prepare(find_source(folder), tmp_path / "out", ByteTokenizer(), shard=SHARD)


def test_a_mistake_before_the_first_shard_does_not_block_the_folder(folder: Path, tmp_path: Path) -> None:
    rows, out = folder / "rows.jsonl", tmp_path / "out"
    with pytest.raises(ValueError, match="txet"):
        prepare(find_source(rows, field="txet"), out, ByteTokenizer())
    prepare(find_source(rows), out, ByteTokenizer())
    prepare(find_source(rows), tmp_path / "whole", ByteTokenizer())
    assert contents(out) == contents(tmp_path / "whole")


def test_one_process_works_in_a_folder(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with lock(out), pytest.raises(RunError, match="out is in use: another process works there"):
        prepare(source, out, ByteTokenizer())
    assert contents(out) == {}
    prepare(source, out, ByteTokenizer())


def test_the_report_shows_counts_and_leaves_provenance(folder: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    options: dict[str, Any] = {"end": None, "field": "text", "validation": 0.2, "workers": 1}
    (folder / "notes.md").write_text("is not read")
    corpus = run_prepare(console, str(folder), tmp_path / "out", tokenizer="bpe:300", **options)
    shown = console.export_text()
    assert "Skipped files that are not" in shown
    assert "notes.md" in shown
    console.file.close()
    assert "tokenizer bpe:300 of 300 tokens, 1 worker" in shown
    assert "100%" in shown
    assert f"tokens {len(corpus.split('train')):>14,}" in shown
    assert json.loads((tmp_path / "out" / "index.json").read_text())["provenance"]["python"]
