"""The guides of docs/clients run as printed, in processes of their own: tools that nobody here wrote, on an exported model.

Guides of tools that the tests do not install (BY_HAND) are tried by hand; tests/mixers/test_hosts.py does what those hosts do.
"""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from hypermlp.models.hf import export
from hypermlp.models.lm import LanguageModel, ModelConfig

GUIDES = Path(__file__).parents[2] / "docs" / "clients"
PORT = "8000"  # as printed in the guide
# Their packages are not in constraints.txt. These guides were run by hand; tests/mixers/test_hosts.py tests the adapters.
BY_HAND = ("x-transformers", "zoology", "mad-lab", "lightning", "torchtitan")


def blocks(guide: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (GUIDES / f"{guide}.md").read_text(), re.M | re.S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the guides take for granted: an exported model and a task with its data."""
    torch.manual_seed(0)
    net = LanguageModel(ModelConfig(vocabulary=257, width=32, depth=2, length=128, mixer=("hyperglu", "softmax")))
    export(net, tmp_path / "my-model", {"kind": "bytes"})
    for name, kind in (("sums.yaml", "yaml"), ("sums.jsonl", "json")):
        (tmp_path / name).write_text(blocks("lm-eval", kind)[0])
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **offline, "PATH": programs}


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_python(guide: str, folder: Path) -> str:
    script = folder / f"guide_{guide.replace('-', '_')}.py"
    script.write_text("\n".join(blocks(guide, "py")))
    return run([sys.executable, str(script)], folder)


@pytest.mark.parametrize("guide", ["nanogpt", "hugging-face", "export", "accelerate"])
def test_a_guide_runs_as_printed(guide: str, folder: Path) -> None:
    run_python(guide, folder)


def test_trl_trains_plain_packed_and_with_adapters(folder: Path) -> None:
    said = run_python("trl", folder)
    assert said.count("train_loss") == 4
    assert (folder / "my-adapter" / "adapter_model.safetensors").is_file()


def test_lm_eval_runs_from_its_own_command_line(folder: Path) -> None:
    (command,) = blocks("lm-eval", "sh")
    said = run(command.split(), folder)
    assert re.search(r"sums.*acc", said)


def test_transformers_serve_answers_a_chat(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (command,), (script,) = blocks("serve", "sh"), blocks("serve", "py")
    server = subprocess.Popen(
        command.replace(PORT, port).split(),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert server.poll() is None, "the server ended by itself"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        (folder / "ask.py").write_text(script.replace(PORT, port))
        run([sys.executable, "ask.py"], folder)
    finally:
        server.terminate()
        server.wait(60)


def test_every_guide_is_run_here() -> None:
    text = Path(__file__).read_text()
    assert all(f'"{guide.stem}"' in text for guide in GUIDES.glob("*.md"))
