"""Sources give the same documents everywhere, in parts that can be read alone; mistakes are named with file and line."""

import json
import sys
import types
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hypermlp.data import text
from hypermlp.data.text import Document, find_source, read


def texts(source: text.Source, validation: bool | None = None) -> list[str]:
    return [d.text for d in source.documents() if validation is None or d.validation == validation]


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_standard_library_is_a_corpus_of_ten_megabytes() -> None:
    source = find_source()
    names = [part.name for part in source.parts]
    assert 6e6 < source.size < 25e6
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "/tests/" in name or name.startswith("test/")]
    assert texts(source)[names.index("bisect.py")].startswith('"""Bisection')
    held_out = [part.size for part in source.parts if part.validation == 1.0]
    assert 0.04 < len(held_out) / len(names) < 0.06
    assert 0.01 < sum(held_out) / source.size < 0.15


def test_whether_a_library_file_is_held_out_depends_on_its_name() -> None:
    sides = {part.name: part.validation for part in find_source().parts}
    # The hash never changes, so neither does a file's side, unless it is the last one on it.
    assert [text.position(name) for name in ("os.py", "abc.py")] == pytest.approx([0.2491, 0.8085], abs=1e-4)
    assert max(text.position(n) for n, side in sides.items() if side) < min(text.position(n) for n in sides if not sides[n])


def test_a_library_file_that_cannot_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("y = 2\n")
    assert texts(find_source()) == ["x = 1\n"]


def test_the_end_of_a_single_text_file_is_held_out(tmp_path: Path) -> None:
    lines = [f"line {i}\n" for i in range(1000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    source = find_source(tmp_path / "a.txt")
    (train,), (validation,) = texts(source, False), texts(source, True)
    assert train + validation == "".join(lines)
    assert validation.startswith("line ")
    assert 0.04 < len(validation) / len(train) < 0.06


def test_long_files_are_read_in_parts_cut_at_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "LONGEST", 100)
    lines = [f"{'äx' * (i % 7)}{i}\n" for i in range(200)]
    (tmp_path / "a.txt").write_text("".join(lines), encoding="utf-8")
    pieces = texts(find_source(tmp_path / "a.txt", validation=0.3))
    assert len(pieces) > 10
    assert "".join(pieces) == "".join(lines)
    assert all(piece.endswith("\n") for piece in pieces)
    rows = write_lines(tmp_path / "b.jsonl", [{"text": line} for line in lines])
    source = find_source(rows)
    assert len(source.parts) > 10
    assert texts(source) == lines


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "c.txt").write_text("text c")
    (tmp_path / "d.txt").write_text("text d")
    (tmp_path / "notes.md").write_text("not read")
    write_lines(tmp_path / "b" / "x.jsonl", [{"text": "one"}, {"text": ""}, {"text": "two"}])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["p", "q", "r"]}), tmp_path / "a.parquet", row_group_size=2)
    source = find_source(tmp_path)
    assert texts(source) == ["p", "q", "r", "one", "two", "text c", "text d"]
    assert [part.name for part in source.parts] == ["a.parquet", "a.parquet", "b/x.jsonl", "c.txt", "d.txt"]
    assert [d.text for d in read(source.parts[1])] == ["r"]
    assert len({d.validation for d in source.documents() if d.text.startswith("text")}) == 2, "one text file is held out"


def compress(path: Path, *frames: bytes) -> Path:
    path.write_bytes(b"".join(pyarrow.Codec("zstd").compress(frame, asbytes=True) for frame in frames))
    return path


def test_compressed_lines_are_read_as_openwebtext2_ships_them(tmp_path: Path) -> None:
    rows = [{"text": f"document {i}, später", "meta": {}} for i in range(300)]
    plain = write_lines(tmp_path / "plain.jsonl", rows)
    (tmp_path / "packed").mkdir()
    content = plain.read_bytes()
    source = find_source(compress(tmp_path / "packed" / "2020-04.jsonl.zst", content[:1001], content[1001:]))
    assert list(source.documents()) == list(find_source(plain).documents())
    assert texts(find_source(tmp_path / "packed")) == texts(find_source(plain))
    assert source.version != find_source(compress(tmp_path / "packed" / "2020-05.jsonl.zst", content)).version


def test_mistakes_in_compressed_lines_are_named(tmp_path: Path) -> None:
    good = b'{"text": "x"}\n'
    for content, message in (
        (good + b"{oops}\n", r"a\.jsonl\.zst, line 2, is not JSON"),
        (good + b'{"body": "x"}\n', "line 2, has no text in a field 'text'"),
        (good + b'{"text": "\xff"}\n', "line 2, is not UTF-8"),
    ):
        with pytest.raises(ValueError, match=message):
            texts(find_source(compress(tmp_path / "a.jsonl.zst", content)))
    path = compress(tmp_path / "b.jsonl.zst", good * 10_000)
    for damaged in (b"no zstandard here", path.read_bytes()[:-9]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"b\.jsonl\.zst, line \d+, cannot be decompressed"):
            texts(find_source(path))


def test_rows_are_held_out_by_their_content(tmp_path: Path) -> None:
    rows = [{"body": f"document {i % 500}"} for i in range(1000)]
    documents = list(find_source(write_lines(tmp_path / "a.jsonl", rows), field="body", validation=0.2).documents())
    assert documents[:500] == documents[500:], "a copy is on the same side"
    assert 0.15 < sum(d.validation for d in documents) / 1000 < 0.25


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    assert texts(find_source(tmp_path / "a.jsonl")) == ["a?b"]


def test_a_hub_dataset_is_streamed_file_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Dataset:
        num_shards = 2

        def shard(self, num_shards: int, index: int) -> list[dict[str, str]]:
            assert num_shards == 2
            return [{"text": f"file {index} row {row}"} for row in range(2)]

    def load_dataset(*arguments: object, **options: object) -> Dataset:
        calls.append((arguments, options))
        return Dataset()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    text.hub_dataset.cache_clear()
    source = find_source("hub:owner/name:small", validation=0)
    assert list(source.documents()) == [Document(f"file {f} row {r}", False) for f in range(2) for r in range(2)]
    assert calls == [(("owner/name", "small"), {"split": "train", "streaming": True})]
    with pytest.raises(ValueError, match="hub:owner/name:small, file 0 has no text in a field 'body'; its fields are: text"):
        texts(find_source("hub:owner/name:small", field="body"))
    text.hub_dataset.cache_clear()


LIBRARIES = [("datasets", "hub:owner/name"), ("pyarrow", "a.parquet"), ("pyarrow", "a.jsonl.zst")]


@pytest.mark.parametrize("module, source", LIBRARIES)
def test_a_missing_library_is_named_with_its_cure(
    module: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("a.parquet").write_bytes(b"")
    Path("a.jsonl.zst").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"needs {module}; install it with: pip install 'hypermlp\[hf\]'"):
        find_source(source)


def test_mistakes_are_named_with_file_and_line(tmp_path: Path) -> None:
    def fails(name: str, content: bytes, message: str, **options: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            texts(find_source(tmp_path / name, **options))

    good = b'{"text": "x"}\n'
    fails("a.jsonl", good + b"\n" + good + b'{"text": oops}\n', r"a\.jsonl, line 4, is not JSON: .* column 10")
    fails(
        "a.jsonl", good + b'{"body": "x", "n": 1}\n', r"line 2, has no text in a field 'text'; its fields are: body \(str\), n"
    )
    fails("a.jsonl", good + b'{"text": null}\n', r"line 2, has no text .* text \(NoneType\)")
    fails("a.jsonl", good + b"[1]\n", "line 2, has no text in a field 'text'; its fields are: none")
    fails("a.txt", b"one\ntwo\n\xff\n" + b"more\n" * 90, r"a\.txt, line 3, is not UTF-8")
    fails("a.parquet", b"no parquet here", r"a\.parquet is not a parquet file")
    fails("a.csv", b"a,b", r"must end in \.txt, \.jsonl, \.jsonl\.zst, \.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["p"], "n": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet has no column 'text'; its columns are: body, n"):
        texts(find_source(tmp_path / "b.parquet"))
    with pytest.raises(ValueError, match=r"b\.parquet holds int in its column 'n'"):
        texts(find_source(tmp_path / "b.parquet", field="n"))
    with pytest.raises(ValueError, match=r"no corpus at .*nowhere; give a file, a folder, 'stdlib'"):
        find_source(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no file that ends in"):
        find_source(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"validation \(1\) is the share"):
        find_source(validation=1)


def test_a_sample_comes_from_all_over_the_training_text(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{i:03d}.txt").write_text(f"{i:03d}" * 100)
    source = find_source(tmp_path, validation=0.1)
    sample = list(source.sample(3000))
    assert 5 <= len(sample) <= 10
    assert int(sample[0][:3]) < 20
    assert int(sample[-1][:3]) >= 80
    assert set(sample) <= set(texts(source, False))
