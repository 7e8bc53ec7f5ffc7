"""The `multigpu plan` command, from the command line to its output and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import multigpu.cli
from multigpu.cli import COMMANDS, machine, main
from multigpu.cli.plan import parse_budgets
from multigpu.devices import inventory, ram
from multigpu.devices.backends import Backend, Device
from multigpu.errors import BackendUnavailable, HostError, InputError
from multigpu.plan import CPU, DeviceBudget, DeviceId
from multigpu.units import GIB
from tests.unit.files.model_files import (
    flux_tensors,
    linear,
    write_gguf,
    write_gguf_types,
    write_raw_safetensors,
    write_safetensors,
)

ROOT = Path(__file__).parents[3]
FLUX_BYTES = 23_802_797_184
DEVICES = "cuda:0=24g@53,cuda:1=12g@12,cpu=64g@25"


@pytest.fixture
def flux(tmp_path: Path) -> str:
    """A file of 23.8 GB, of which the header is there."""
    return str(write_safetensors(tmp_path / "flux.safetensors", flux_tensors()))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("words", "request_", "resident"),
    [
        (["cuda:0,8gb;cpu,*"], "cuda:0,8gb;cpu,*", 8 * GIB),
        (["cuda:0,25%;cpu,75%"], "cuda:0,25%;cpu,75%", FLUX_BYTES // 4),
        (["--virtual-vram", "8", "--donor", "cpu"], "#;8;cpu", FLUX_BYTES - 8 * GIB),
        (["--virtual-vram", "8gb"], "#;8;cpu", FLUX_BYTES - 8 * GIB),
        (["--virtual-vram", "4", "--donor", "cuda:1", "--donor", "cpu"], "#;4;cuda:1,cpu", FLUX_BYTES - 4 * GIB),
        (["--auto"], "auto", int(21.5 * GIB)),
        ([], "auto", int(21.5 * GIB)),
        (["auto,10gb"], "auto,10gb", int(13.5 * GIB)),
        (["0.5"], "0.5", 12 * GIB),
    ],
)
def test_requests(
    capsys: pytest.CaptureFixture[str], flux: str, words: list[str], request_: str, resident: int
) -> None:
    code, out, err = run(capsys, flux, "--devices", DEVICES, "--compute", "cuda:0", *words, "--json")
    data = json.loads(out)
    homes = data["plan"]["bytes_by_home"]
    assert (code, err) == (0, "")
    assert (data["request"], data["family"], data["files"]) == (request_, "Flux", [flux])
    assert sum(homes.values()) == FLUX_BYTES
    assert 0 <= resident - homes["cuda:0"] < 132_200_000  # the largest block


@pytest.mark.parametrize(
    ("words", "on_disk"),
    [
        (["cuda:0,4gb;cpu,4gb;disk,*"], FLUX_BYTES - 8 * GIB),
        (["--auto"], FLUX_BYTES - int(5.5 * GIB) - 5 * GIB),
        (["cuda:0,4gb;cpu,*", "--devices", "cuda:0=8g,cpu=64g,disk"], 0),
    ],
)
def test_the_model_file_is_a_device(
    capsys: pytest.CaptureFixture[str], flux: str, words: list[str], on_disk: int
) -> None:
    """In RAM auto leaves an eighth free."""
    code, out, err = run(capsys, flux, "--devices", "cuda:0=8g,cpu=6g/8g,disk@2", *words, "--json")
    assert (code, err) == (0, "")
    assert abs(json.loads(out)["plan"]["bytes_by_home"].get("disk", 0) - on_disk) < 3 * 132_200_000
    code, out, err = run(capsys, flux, "--devices", "cuda:0=8g,cpu=6g/8g,disk@2", *words)
    assert ("\ndisk " in out) == (on_disk > 0)


def test_weights_of_gguf_files_do_not_rest_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", linear("a", 64, 64)))
    code, out, err = run(capsys, path, "cuda:0,50%;disk,*", "--devices", "cuda:0=8g,cpu=6g,disk@2")
    assert (code, out) == (2, "") and "GGUF file cannot rest in it; write cpu instead" in err
    assert run(capsys, path, "--devices", "cuda:0=8g,cpu=6g,disk@2")[0] == 0


def test_a_mac_has_one_gpu_without_a_number(capsys: pytest.CaptureFixture[str], flux: str) -> None:
    for name in ("mps", "mps:0"):
        code, out, err = run(capsys, flux, "--devices", f"{name}=16g@100,cpu=64g@25", f"{name},50%;cpu,50%")
        assert (code, err) == (0, "")
        assert "\nmps (computes)" in out and "request mps,50%;cpu,50%" in out and "mps:0" not in out
        _, out, _ = run(capsys, flux, "--json", "--devices", f"{name}=16g@100,cpu=64g@25", f"{name},50%;cpu,50%")
        assert '"mps"' in out and "mps:0" not in out


def test_table(capsys: pytest.CaptureFixture[str], flux: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(capsys, flux, "--devices", DEVICES, "cuda:0,8gb;cpu,*", "--step-seconds", "0.4")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "flux.safetensors: a Flux model; request cuda:0,8gb;cpu,*"
    assert lines[2].split() == ["device", "blocks", "bytes", "share", "link", "time"]
    assert lines[3].startswith("cuda:0 (computes)")
    assert lines[-1].startswith("Predicted step: 0.4") and "copied only in the first step of a run" in lines[-1]
    monkeypatch.setenv("MULTIGPU_HOIST", "off")
    _, streamed, _ = run(capsys, flux, "--devices", DEVICES, "cuda:0,8gb;cpu,*", "--step-seconds", "0.4")
    assert streamed.splitlines()[-1].startswith("Predicted step: 0.6")
    _, rough, _ = run(capsys, flux, "--devices", DEVICES, "cuda:0,8gb;cpu,*")
    assert "--step-seconds" in rough


def test_reason_of_one_block(capsys: pytest.CaptureFixture[str], flux: str) -> None:
    code, out, _ = run(capsys, flux, "--devices", DEVICES, "--block", "double_blocks.3.img_mod.lin")
    assert code == 0
    assert out.startswith("double_blocks.3.img_mod.lin (108.0 MiB) rests on cuda:0: it stays")
    code, _, err = run(capsys, flux, "--devices", DEVICES, "--block", "img_mod")
    assert (code, "did you mean" in err) == (2, True)


def test_a_smaller_ring(capsys: pytest.CaptureFixture[str], flux: str) -> None:
    _, out, _ = run(capsys, flux, "--devices", DEVICES, "cpu,*", "--ring", "300mb", "--json")
    assert json.loads(out)["plan"]["ring_bytes"] == 300 * 2**20


def test_the_compute_device_defaults_to_the_first_accelerator_or_the_requests_own(
    capsys: pytest.CaptureFixture[str], flux: str
) -> None:
    for words, compute in (
        (["--devices", "cpu=64g,cuda:1=40g"], "cuda:1"),
        (["--devices", "cpu=64g"], "cpu"),
        (["--devices", "cuda:0=40g,cuda:1=40g,cpu=64g", "#cuda:1;4.0;cpu"], "cuda:1"),
    ):
        _, out, _ = run(capsys, flux, "--json", *words)
        assert json.loads(out)["plan"]["compute"] == compute


def test_gguf_and_shards(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = write_gguf(tmp_path / "flux.gguf", flux_tensors(2, 2), strings=["a"] * 1000)
    code, out, _ = run(capsys, str(path), "--devices", DEVICES, "cpu,*")
    assert (code, "a Flux model" in out) == (0, True)
    parts = [write_safetensors(tmp_path / f"m{i}.safetensors", linear(f"x.{i}", 64, 64)) for i in range(3)]
    code, out, _ = run(capsys, *map(str, parts), "cpu,*", "--devices", DEVICES)
    assert (code, out.splitlines()[0]) == (
        0,
        "m0.safetensors, m1.safetensors, m2.safetensors: a model of an unknown family; request cpu,*",
    )


@pytest.mark.parametrize("version", [2, 3])
def test_a_plan_for_a_file_with_every_type_of_the_gguf_package(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, version: int
) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "all.gguf"
    wrote = write_gguf_types(path, gguf.GGMLQuantizationType, version)
    code, out, err = run(capsys, str(path), "--devices", DEVICES, "cpu,*", "--json")
    plan = json.loads(out)["plan"]
    assert (code, err) == (0, "")
    assert sum(plan["bytes_by_home"].values()) == sum(size for *_, size in wrote)
    assert {row["block"] for row in plan["placements"]} == {name.rpartition(".")[0] for name, *_ in wrote}
    code, out, err = run(capsys, str(path), "--devices", DEVICES, "cpu,*")
    assert (code, err) == (0, "") and out.startswith("all.gguf: a model of an unknown family; request cpu,*")


def test_a_checkpoint_says_which_part_it_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensors = {**flux_tensors(1, 1, prefix="model.diffusion_model."), **linear("first_stage_model.decoder", 64, 64)}
    path = str(write_safetensors(tmp_path / "all.safetensors", tensors))
    assert "a Flux model, its diffusion model" in run(capsys, path, "--devices", DEVICES)[1]
    assert "an unknown family, its vae model" in run(capsys, path, "--devices", DEVICES, "--component", "vae")[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{flux}", "cuda:0,4 giraffes"], "'giraffes' is not a unit"),
        (["{flux}", "cuda:7,4gb"], "cuda:7 is not present; this machine has cpu, cuda:0, cuda:1"),
        (["{flux}", "cuda:1,20gb"], "write cuda:1,"),
        (["{flux}", "cuda:0,8gb", "cpu,*"], "at most one allocation"),
        (["{flux}", "cuda:0,8gb;gpu:0,4gb;cpu,*"], "cuda:0 and gpu:0 are the same device, cuda:0; write only one of"),
        (["cuda:0,8gb"], "is not a model file"),
        (["{flux}", "0.5", "--auto"], "exclude each other"),
        (["{flux}", "--donor", "cpu"], "--donor goes with --virtual-vram"),
        (["{flux}", "--virtual-vram", "many"], "'many' is not a size"),
        (["{flux}", "--virtual-vram", "8", "--donor", "cuda:0"], "cannot be its own donor"),
        (["{flux}", "--component", "vae"], "no component 'vae'"),
        (["{flux}", "--compute", "cuda0"], "'cuda0' is not a device"),
        (["missing.safetensors"], "missing.safetensors cannot be read"),
        (["x" * 355], "is not a model file"),
        (["{flux}", "cuda:0," + "8" * 348], "is not an amount"),
        (["x" * 355 + ".safetensors"], "cannot be read: File name too long"),
        (["/dev/zero"], "/dev/zero is not a model file"),
        (["no\nsuch.safetensors"], "no\\nsuch.safetensors cannot be read"),
        (["{flux}", "--compute", "gpu:2"], "gpu:2 is not present; this machine has cpu, cuda:0, cuda:1"),
        (["{flux}", "--virtual-vram", "-5"], "'-5' is not a size"),
        (["{flux}", "--virtual-vram", "1e400"], "'1e400' is not a size"),
        (["{flux}", "--ring", "9" * 400], "is not a size"),
        (["{flux}", "--component", "leg"], "invalid choice: 'leg'"),
        (["{flux}", "--fly"], "unrecognized arguments: --fly; `python -m multigpu plan --help` lists"),
        ([], "required: FILE, ALLOCATION"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_two(
    capsys: pytest.CaptureFixture[str], flux: str, words: list[str], says: str
) -> None:
    code, out, err = run(capsys, "--devices", DEVICES, *(word.format(flux=flux) for word in words))
    assert (code, out) == (2, "")
    assert err.startswith("multigpu plan: ") and err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon", "1e308", "1e-308", "inf", "9" * 400])
def test_a_step_takes_a_time_that_can_be_measured(capsys: pytest.CaptureFixture[str], flux: str, seconds: str) -> None:
    code, out, err = run(capsys, flux, f"--step-seconds={seconds}", "--devices", DEVICES, "cpu,*")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is not the time of a step; give seconds from 0.000001 to 1000000, as in 0.2" in err


@pytest.mark.parametrize(
    ("words", "request_", "compute"),
    [
        (["gpu:1,8gb;cpu,*", "--compute", "gpu:1"], "cuda:1,8gb;cpu,*", "cuda:1"),
        (["rocm:1,8gb;cpu,*", "--compute", "hip"], "cuda:1,8gb;cpu,*", "cuda:0"),
        (["--virtual-vram", "4", "--donor", "gpu:1", "--compute", "GPU"], "#;4;cuda:1", "cuda:0"),
        (["#gpu:1;4.0;cpu"], "#cuda:1;4;cpu", "cuda:1"),
        (["auto", "--compute", "default"], "auto", "cuda:0"),
    ],
)
def test_devices_have_the_names_that_the_nodes_know(
    capsys: pytest.CaptureFixture[str], flux: str, words: list[str], request_: str, compute: str
) -> None:
    _, out, err = run(capsys, flux, "--devices", "cpu=64g,cuda:0=24g,cuda:1=24g", "--json", *words)
    assert err == ""
    assert (json.loads(out)["request"], json.loads(out)["plan"]["compute"]) == (request_, compute)


def test_devices_that_are_named_by_hand_keep_their_names(capsys: pytest.CaptureFixture[str], flux: str) -> None:
    _, out, _ = run(capsys, flux, "--devices", "gpu:0=24g,directml:0=24g,cpu=64g", "--json", "directml,1gb;gpu:0,*")
    assert json.loads(out)["request"] == "directml:0,1gb;gpu:0,*"


@pytest.mark.parametrize(
    "devices",
    [
        "cuda:0",
        "cuda:0=",
        "cuda:0=24g@fast",
        "cuda:0=24g@0",
        "=24g",
        "cuda:0=24g/12g",
        "cpu=x",
        "cpu=-5g",
        "cuda:0=24g@" + "9" * 400,
        "cuda:0=24g@0." + "0" * 300 + "1",
        "cuda:0=24g@1.2.3",
        "x" * 400,
    ],
)
def test_wrong_devices(capsys: pytest.CaptureFixture[str], flux: str, devices: str) -> None:
    code, _, err = run(capsys, flux, "--devices", devices)
    assert code == 2 and err.count("\n") == 1
    assert len(err) < 300


def test_budgets() -> None:
    assert parse_budgets("cuda:0=22g/24g@53.6, cpu=64") == [
        DeviceBudget(DeviceId("cuda", 0), 24 * GIB, 22 * GIB, 53.6e9),
        DeviceBudget(CPU, 64 * GIB, 64 * GIB),
    ]


def test_bad_files_end_with_two_and_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\xff" * 100)
    cut = write_raw_safetensors(tmp_path / "cut.safetensors", b'{"a": {"dtype": "F32", "shape"', 0)
    other = tmp_path / "notes.txt"
    other.write_text("not a model")
    for path in (bad, cut, other):
        code, out, err = run(capsys, str(path), "--devices", DEVICES)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert str(path) in err


def test_without_devices_the_machine_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", linear("a", 64, 64))
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    code, out, err = run(capsys, str(path), "--json")
    assert (code, json.loads(out)["plan"]["compute"]) == (0, "cpu")
    assert err == "multigpu plan: torch is not installed, so only the cpu is known; name other devices with --devices\n"


def test_accelerators_are_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def cards(backend: Backend) -> list[Device]:
        if backend.type == "npu":
            raise BackendUnavailable("npu is installed but does not work: no driver")
        sizes = {"cuda": [8, 9], "xpu": [None]}.get(backend.type, [])
        return [Device(DeviceId(backend.type, index), "Card", size) for index, size in enumerate(sizes)]

    monkeypatch.setattr(inventory, "probe", cards)
    monkeypatch.setattr(inventory, "free_bytes", lambda device: 5 + device.index)
    notes: list[str] = []
    budgets = machine.machine_budgets(notes.append)
    known = [(str(budget.device), budget.free, budget.total) for budget in budgets]
    assert known[:-1] == [("cuda:0", 5, 8), ("cuda:1", 6, 9)]
    assert known[-1][0] == "cpu" and known[-1][2] > 0
    assert notes == [
        "npu is installed but does not work: no driver",
        "torch does not report the memory of xpu:0; name it with --devices",
    ]


def test_a_system_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "find_spec", lambda name: None)
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(InputError, match="psutil"):
        machine.machine_budgets(lambda note: None)


def test_ram_is_what_psutil_says() -> None:
    psutil = pytest.importorskip("psutil")
    assert machine.machine_budgets(lambda note: None)[-1].total == psutil.virtual_memory().total


def test_the_dispatcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in COMMANDS)
    assert main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["multigpu", "walk"])
    assert main() == 2

    def broken(name: str, package: str) -> None:
        raise HostError("the link is gone")

    monkeypatch.setattr(multigpu.cli, "import_module", broken)
    assert main(["plan"]) == 1
    assert "multigpu plan: the link is gone" in capsys.readouterr().err


def test_as_a_module_without_torch_or_the_host(flux: str) -> None:
    """Neither torch nor numpy is imported for a safetensors file with named devices."""
    program = (
        "import sys, runpy; sys.argv = ['multigpu', *sys.argv[1:]]\n"
        "try: runpy.run_module('multigpu', run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "loaded = {'torch', 'numpy', 'gguf', 'comfy'} & set(sys.modules)\n"
        "sys.exit(code or len(loaded))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", flux, "--devices", DEVICES, "cuda:0,8gb;cpu,*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "cuda:0 (computes)" in done.stdout
