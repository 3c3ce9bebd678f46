"""Reports of real plans: from the API, from plan files, measured and compared with the original."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz

import rekindle
from rekindle.cli import main
from rekindle.cli.demo_training import BATCH, GPT, LENGTH, VOCABULARY
from rekindle.predict import StepMeasurement
from rekindle.report import verdict

MODELS = """
from rekindle.cli.demo_training import BATCH, GPT, LENGTH, VOCABULARY
import torch

def gpt():
    torch.manual_seed(0)
    return GPT().train(), (torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY,)
"""


@pytest.fixture(scope="module")
def plan():
    text = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY
    return rekindle.plan(GPT().train(), (text,), budget=0.5, time_limit_s=3, profile="estimate")


@pytest.fixture
def folder(tmp_path, monkeypatch, plan):
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    plan.save("plan.json")
    return tmp_path


def run(capsys, *arguments):
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return int(code), out, err


def test_a_plan_tells_of_a_loss_outside_that_may_not_fit():
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4096))
    x = torch.randn(512, 8)
    said = {"profile": "estimate", "time_limit_s": 1.0}
    outside = rekindle.plan(model, (x,), budget=1.0, **said).explain()
    assert "The loss is outside the plan." in outside
    assert "loss_fn=" in outside
    roomy = rekindle.plan(model, (x,), budget="1GiB", **said).explain()
    inside = rekindle.plan(model, (x,), budget=1.0, loss_fn=lambda y: y.square().mean(), **said)
    assert "outside the plan" not in roomy + inside.explain()


def test_a_plan_explains_itself(plan, folder):
    text = plan.explain()
    assert text.startswith("Fits ")
    assert "blocks" in text
    assert "mlp" in text
    assert "outside the plan" not in text  # the loss is the model's own
    sentence = plan.explain("blocks.2.mlp")
    assert sentence.startswith("blocks.2.mlp: ")
    stored = rekindle.Plan.load("plan.json")
    assert stored.explain("blocks.2.mlp") == sentence
    assert stored.explain().partition(", proven")[0] == text.partition(", proven")[0]


def test_a_plan_writes_its_page(plan, folder):
    told = verdict(plan.account())
    measured = StepMeasurement(plan.peak_bytes, 10**8, 0, 0, 1, "cpu")
    path = plan.report("own.html", measured=measured, time_limit_s=1)
    text = path.read_text()
    assert told in text
    assert "rekindle.plan(model, args" in text
    assert "Not measured." not in text
    assert rekindle.Plan.load("plan.json").report("stored.html", time_limit_s=0).is_file()
    assert "What memory costs in time" not in Path("stored.html").read_text()


def test_a_report_of_a_run(plan, folder, capsys):
    arguments = ("--model", "models.py:gpt", "--time-limit", "1", "-o", "page.html", "--json")
    code, out, _ = run(capsys, "report", "plan.json", *arguments)
    assert code == 0
    assert json.loads(out)["peak"] == plan.peak_bytes
    text = Path("page.html").read_text()
    assert "Compared with the original model: bitwise identical: all" in text
    assert "measured" in text
    code, out, _ = run(capsys, "explain", "plan.json")
    assert code == 0
    assert out.startswith("Fits ")
    code, _, err = run(capsys, "explain", "plan.json", "--budget", "0.5")
    assert (code, "has its own schedule and budget" in err) == (2, True)


def test_torch_reads_the_snapshot(plan, folder, capsys):
    assert run(capsys, "export", "plan.json", "--format", "memory-viz")[0] == 0
    with open("plan.pickle", "rb") as file:
        snapshot = pickle.load(file)
    assert "segments" in _memory_viz.segsum(snapshot)
    told = _memory_viz.trace(snapshot)
    assert told.count("free completed") == told.count("del ") > 100
    # Gradients are what is left at the end; the frames name their modules.
    assert "blocks.3.qkv" in _memory_viz.memory(snapshot, format_flamegraph=str)
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)


def test_plan_prints_the_verdict_and_an_interrupt_leaves_the_best_plan(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "rekindle", "plan", "models.py:gpt", "--budget", "0.3",
         "--profile", "estimate", "--time-limit", "200", "--gap", "0", "-o", "best.json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ),
    )  # fmt: skip
    begun = threading.Event()
    errors: list[bytes] = []

    def read() -> None:
        for line in process.stderr:
            errors.append(line)
            if b" gap " in line or b"cost" in line:
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait(120)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out = process.stdout.read().decode()
    process.stdout.close()
    assert process.wait(60) == 0
    reader.join()
    process.stderr.close()
    assert "Traceback" not in b"".join(errors).decode()
    assert out.startswith("Fits ")
    assert rekindle.Plan.load("best.json").peak_bytes > 0


def test_a_gpu_that_waits_for_its_host_is_told_of() -> None:
    def explained(size: int, **more: object) -> str:
        model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU())
        x = torch.randn(2048, size)
        plan = rekindle.plan(model, (x,), budget=1.0, profile="estimate", **more)
        return plan.explain()

    small = explained(8, device_profile="h200")
    assert "The host needs" in small
    assert "cuda_graph=True" in small
    assert "cuda_graph" not in explained(2048, device_profile="h200")
    assert "cuda_graph" not in explained(8, device_profile="cpu")
