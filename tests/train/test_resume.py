"""Whatever stops a run, it goes on where it was, and ends with the same bits."""

import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from small import TRAIN, config, contents, described, go_on, model, scenario, share

from hypermlp import notice
from hypermlp.models.saved import load_model, weights
from hypermlp.train.checkpoint import COMPLETE, Checkpoints, complete, load_checkpoint, newest, step_of
from hypermlp.train.distributed import World
from hypermlp.train.language import new_training
from hypermlp.train.metrics import Metrics, read_metrics
from hypermlp.train.run_folder import RunFolder


def written(folder: Path) -> dict[str, object]:
    """What the final checkpoint holds, and what was said of each step."""
    records = [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in read_metrics(folder / "metrics.jsonl")]
    checkpoint = newest(folder / "checkpoints")
    return {"tensors": contents(checkpoint), "records": records}


def test_ten_kills_change_no_bit(tmp_path: Path) -> None:
    scenario("kills", tmp_path)
    expected = written(tmp_path / "undisturbed")
    assert [record["step"] for record in expected["records"]] == list(range(1, 13))
    killed = sorted(tmp_path.glob("killed-*"))
    assert killed
    for folder in killed:
        assert written(folder) == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_stops_on_demand_goes_on_with_the_same_bits(tmp_path: Path, asynchronous: bool) -> None:
    how = config(asynchronous=asynchronous)
    go_on(tmp_path / "whole", how)
    go_on(tmp_path / "parts", how, until=3)
    assert [step_of(path) for path in complete(tmp_path / "parts" / "checkpoints")] == [3, 2]
    go_on(tmp_path / "parts", how)
    assert written(tmp_path / "parts") == written(tmp_path / "whole")
    assert [step_of(path) for path in complete(tmp_path / "parts" / "checkpoints")] == [8, 6]


def damage_bit(path: Path) -> None:
    shard = next(path.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)


def cut(path: Path) -> None:
    shard = next(path.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size // 2)


def forget(path: Path) -> None:
    (path / COMPLETE).unlink()


def lose(path: Path) -> None:
    next(path.glob("*.safetensors")).unlink()


@pytest.mark.parametrize("damage", [damage_bit, cut, forget, lose])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    go_on(tmp_path / "whole")
    go_on(tmp_path / "run", until=4)
    last, before = complete(tmp_path / "run" / "checkpoints")
    damage(last)
    with caplog.at_level("INFO", notice.logger.name):
        assert newest(tmp_path / "run" / "checkpoints") == before
    assert f"{last} is damaged" in caplog.text
    go_on(tmp_path / "run")
    assert written(tmp_path / "run") == written(tmp_path / "whole")


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """A copy under another name, a link and a file beside the checkpoints block neither resuming nor pruning."""
    go_on(tmp_path / "whole")
    folder = tmp_path / "run" / "checkpoints"
    go_on(tmp_path / "run", until=2)
    shutil.copytree(folder / "step-00000002", folder / "step-00000002-backup")
    (folder / "step-best").symlink_to("step-00000002")
    (folder / "step-00000001").symlink_to("step-00000002")
    (folder / "step-00000004").symlink_to("elsewhere")  # in the way of a checkpoint to come
    (folder / "step-99999999").write_text("")
    assert newest(folder) == folder / "step-00000002"
    go_on(tmp_path / "run")
    assert written(tmp_path / "run") == written(tmp_path / "whole")
    left = sorted(path.name for path in folder.iterdir())
    assert left == [*("step-00000001", "step-00000002-backup", "step-00000006", "step-00000008", "step-99999999", "step-best")]


@pytest.mark.parametrize("line", [b'{"step": "x", "loss": 1}', b'{"step": 2, "loss": []}', b"[" * 200_000, b"3", b'{"ste'])
def test_a_damaged_line_of_metrics_is_dropped_with_a_notice(
    line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.5, "sample": "a"}\n' + line + b"\n")
    with caplog.at_level("INFO", notice.logger.name):
        assert [record["step"] for record in read_metrics(path)] == [1]
    assert "dropped 1 damaged line" in caplog.text
    Metrics(tmp_path / "metrics.jsonl", 1).close()
    assert path.read_bytes().count(b"\n") == 1


def test_leftovers_of_a_kill_are_swept_away(tmp_path: Path) -> None:
    for name in (".new-step-00000004", ".old-step-00000002"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    go_on(tmp_path, until=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, wait: bool) -> None:
    training = new_training(model(), TRAIN)
    checkpoints = Checkpoints(tmp_path, World(), files={"config.json": described()})
    checkpoints.save(0, training.state())
    training.update(share(0, TRAIN, World()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write the checkpoint of step 1 .* make room"):
            checkpoints.save(1, training.state(), wait=wait) or checkpoints.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    assert newest(tmp_path) is not None
    checkpoints.save(1, training.state())  # there is room again
    assert step_of(newest(tmp_path)) == 1


def test_what_is_saved_while_training_goes_on_is_the_state_at_that_step(tmp_path: Path) -> None:
    training = new_training(model(), TRAIN)
    checkpoints = Checkpoints(tmp_path, World(), files={"config.json": described()})
    before = {name: tensor.clone() for name, tensor in training.state().items()}
    checkpoints.save(0, training.state(), wait=False)
    training.update(share(0, TRAIN, World()))
    checkpoints.finish()
    again = new_training(model(), TRAIN)
    checkpoints.load(tmp_path / "step-00000000", again.state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state().items())


def test_an_exported_checkpoint_is_a_saved_model(tmp_path: Path) -> None:
    training = go_on(tmp_path, until=1)
    checkpoint = newest(tmp_path / "checkpoints")
    RunFolder(tmp_path).save_model()
    for found in (load_model(tmp_path / "model"), load_checkpoint(checkpoint)):
        for name, tensor in weights(training.model).items():
            assert torch.equal(weights(found)[name], tensor)


def test_no_file_of_a_checkpoint_can_hold_code(tmp_path: Path) -> None:
    go_on(tmp_path, until=1)
    assert {path.suffix for path in newest(tmp_path / "checkpoints").iterdir()} == {".safetensors", ".json"}


def test_a_damaged_run_json_is_named_and_a_missing_one_says_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.read() == {}
    run.write({"config": {}})
    assert run.read() == {"config": {}}
    for damaged in ('{"config": {', "[]"):
        run.run.write_text(damaged)
        with pytest.raises(ValueError, match=r"run\.json .* restore it, or move its folder away"):
            run.read()
