"""The benchmark of decoders of transformers: its figures, its floor, and what it names as wrong."""

import copy
import itertools
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import figures_table
import pytest
import torch
from lib.examples import call, load
from rivals import decoders

pytest.importorskip("transformers")
SMALL = ["--tiny", "--device", "cpu", "--compiler", "eager", "--at-once", "1"]
SMALL += ["--models", "llama-1b", "--rows", "2", "--cache", "64", "--used", "20"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program; its processes run in this one, which has imported torch."""
    module = load("benchmarks/generate_time.py")

    def run_here(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        torch._dynamo.reset()
        rows = module.rows_of_job(module.arguments(command[2:]))
        return subprocess.CompletedProcess(command, 0, json.dumps(rows), "")

    monkeypatch.setattr(module.subprocess, "run", run_here)
    return module


@pytest.mark.slow
def test_each_part_is_measured(benchmark: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    ways = ["--ways", "eager", "cgcompile", "custom_generate", "cgcompile no_such_setting=1"]
    done = call(benchmark, *SMALL, *ways, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()
    assert printed[0].startswith("left out, ")
    assert printed[0].endswith(": cgcompile no_such_setting=1")
    assert printed[-1] == "all right: yes"
    rows = json.loads(file.read_text())["rows"]
    measured = ("eager", "cgcompile", "custom_generate")
    parts = {"step": measured[:2], "generate": measured}  # its step is that of cgcompile
    assert [(row["part"], row["way"]) for row in rows if row["part"] != "first"] == [
        (part, way) for part, of_part in parts.items() for way in of_part
    ]
    starts = [(row["way"], row["start"]) for row in rows if row["part"] == "first"]
    assert starts == [(way, start) for start in ("cold", "warm") for way in measured]
    for row in rows:
        if row["part"] == "step":
            assert 0 < row["error"] < 0.1
            assert row["host_ms"] > 0
        else:
            assert row["regret"] <= 0.5
        if row["part"] == "generate":
            assert row["first_s"] > 0
        if row["way"] == "custom_generate" and row["part"] == "generate":
            assert row["replayed"] > 0.5
        if row["way"] == "cgcompile":
            assert row["replayed"] == 1 if row["part"] == "step" else row["replayed"] > 0.5


@pytest.mark.slow
def test_a_wrong_way_is_named(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a step that reads positions that are not in use."""

    def wrong(way: str, backend: Any, forward: Any) -> Any:
        def run(past_key_values: Any, **rest: Any) -> Any:
            for layer in past_key_values.layers:
                layer.cumulative_length.add_(1)
            return forward(past_key_values=past_key_values, **rest)

        return run

    monkeypatch.setattr(benchmark, "compiled", wrong)
    done = call(benchmark, *SMALL, "--ways", "torch.compile", "--parts", "step")
    assert done.returncode == 1
    assert "BROKEN: step, llama-1b, 2 x 20 of 64, torch.compile: RMS error " in done.stdout
    assert done.stdout.splitlines()[-1] == "all right: no"


@pytest.mark.slow
def test_a_failed_process_is_named(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 3, "", "")
    monkeypatch.setattr(benchmark.subprocess, "run", lambda *_, **__: failed)
    done = call(benchmark, *SMALL, "--ways", "eager", "--parts", "step")
    assert done.returncode == 1
    assert "eager: its process ended with code 3: see above" in done.stdout


@pytest.mark.slow
def test_a_process_that_takes_too_long_ends() -> None:
    module = load("benchmarks/generate_time.py")
    done = call(module, *SMALL, "--ways", "eager", "--parts", "step", "--seconds", "0.1")
    assert done.returncode == 1
    assert "BROKEN: step, llama-1b, 2 x 20 of 64, eager: the time is over" in done.stdout


@pytest.mark.slow
def test_the_regret_of_a_token_is_its_distance_to_the_best(benchmark: ModuleType) -> None:
    args = benchmark.arguments(SMALL)
    model = benchmark.made_on("cpu", benchmark.configuration(args, "llama-1b"))
    text, _ = benchmark.text_of(args, model, "eager", benchmark.Cell(2, 64, 20))
    tokens = text(6)
    assert benchmark.regret_of(model, tokens, 20) <= 0.05
    tokens[1, 23] = (tokens[1, 23] + 1) % 256
    assert benchmark.regret_of(model, tokens, 20) > 0.5


@pytest.mark.slow
def test_the_floor_counts_what_a_step_reads(benchmark: ModuleType) -> None:
    """An embedding that is no head is not read; one that is tied to the head is read once."""
    args = benchmark.arguments([])
    every, read = benchmark.weight_bytes(benchmark.configuration(args, "llama-8b"))
    assert every - read == 2 * 128256 * 4096
    assert read == pytest.approx(15.01e9, rel=1e-3)
    tied = benchmark.weight_bytes(benchmark.configuration(args, "llama-1b"))
    assert tied == (2471628800, 2471628800)
    config = benchmark.configuration(args, "llama-8b")
    assert benchmark.cache_bytes(config, 8, 200) == 2 * 32 * 8 * 200 * 8 * 128 * 2


def test_cells_leave_out_what_has_no_room_for_a_text(benchmark: ModuleType) -> None:
    args = benchmark.arguments(["--rows", "1", "--cache", "1024", "4096", "--used", "200", "900"])
    every = ["1 x 200 of 1024", "1 x 900 of 1024", "1 x 200 of 4096", "1 x 900 of 4096"]
    assert [str(cell) for cell in benchmark.cells(args, "step")] == every
    del every[1]
    assert [str(cell) for cell in benchmark.cells(args, "first")] == every


def test_jobs_are_left_out_by_an_expression(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run_job(args: Any, job: Any, *_: Any) -> list[Any]:
        started.append(job.label)
        return []

    monkeypatch.setattr(benchmark, "run_job", run_job)
    args = benchmark.arguments(
        [*SMALL, "--ways", "eager", "cgcompile", "--skip", "first|generate.*eager"]
    )
    assert list(benchmark.all_rows(args)) == []
    assert sorted(started) == [
        "generate llama-1b cgcompile rows=2",
        "step llama-1b cgcompile rows=2",
        "step llama-1b eager rows=2",
    ]


def test_a_process_waits_for_others_that_compile(benchmark: ModuleType, tmp_path: Path) -> None:
    with benchmark.Turn(str(tmp_path)) as first, benchmark.Turn(str(tmp_path)) as other:
        first.compiling()
        with other.measuring(until=0.0) as quiet:
            assert not quiet
        with first.measuring(until=0.0) as quiet:
            assert quiet
        with other.measuring(until=0.0) as quiet:
            assert quiet


def test_a_way_names_what_is_known(benchmark: ModuleType) -> None:
    assert benchmark.settings_of("cgcompile kernels=-small_batch") == {"kernels": "-small_batch"}
    with pytest.raises(ValueError, match="unknown way 'tensorrt'"):
        benchmark.is_known("tensorrt")


# ---------------------------------------------------------------- tables


@pytest.fixture
def result() -> dict[str, Any]:
    rows = []
    ways = {"reduce-overhead": 1.6, "cgcompile": 0.8}
    for (way, gpu), count in itertools.product(ways.items(), (1, 8)):
        row = {"model": "llama-1b", "cell": [count, 1024, 200], "way": way, "floor_ms": 0.58}
        kinds = {"products": gpu / 2, "attention": 0.1, "rest": gpu / 4}
        more = {"kernels": 90.0, "kinds": kinds, "error": 0.02, "eager_error": 0.01, "probe_us": 99}
        step = {"part": "step", "gpu_ms": gpu + count / 100, **more, "timeline": [["k", 0, 1]]}
        rows.append(row | step)
        rows.append(row | {"part": "generate", "token_ms": 2 * gpu})
        for start, seconds in (("cold", 9.0), ("warm", 4.25)):
            rows.append(row | {"part": "first", "start": start, "first_s": seconds})
    rows.append({"part": "step", "model": "llama-1b", "way": "cgcompile", "failure": "memory"})
    rows[-1]["cell"] = [16, 1024, 200]
    about = {"card": "a GPU", "torch": "2.0", "transformers": "5.0", "cgcompile": "0.1.0"}
    about |= {"bandwidth": 4e12, "date": "2030-01-02", "models": ["llama-1b"], "ways": list(ways)}
    return {**about, "rows": rows}


def test_the_tables_have_all_parts(result: dict[str, Any]) -> None:
    text = decoders.section(result)
    assert text.startswith("a GPU, torch 2.0, transformers 5.0, cgcompile 0.1.0, 4.00 TB/s, ")
    rows = text.splitlines()
    (floor,) = (
        at for at, row in enumerate(rows) if row.startswith("| llama-1b, 8 x 200 of 1024 | f")
    )
    assert rows[floor + 1] == (
        "|  | reduce-overhead | 1.680 | 2.90 | 0.800 | 0.100 | 0.400 | 90 | 2.00 | 99 |"
    )
    assert "| llama-1b, 8 x 200 of 1024 | 3.20 | 1.60 |" in rows
    assert "| llama-1b, 8 x 200 of 1024 | 9.0 | 4.2 | 9.0 | 4.2 |" in rows
    assert not [row for row in rows if "16 x 200" in row]


def test_the_short_table_has_rows_beside_each_other(result: dict[str, Any]) -> None:
    *_, last = decoders.short_section(result).splitlines()
    assert last == (
        "| llama-1b-like | 0.58 / 0.58 | 1.61 / 1.68 | 0.81 / 0.88 | 3.20 / 3.20 | 1.60 / 1.60 |"
    )


def test_results_are_joined_by_what_was_measured(result: dict[str, Any]) -> None:
    again = copy.deepcopy(result)
    again["rows"] = [row | {"gpu_ms": 0.5} for row in again["rows"][:1]]
    both = decoders.joined(result, again)
    assert len(both["rows"]) == len(result["rows"])
    assert [row["gpu_ms"] for row in both["rows"] if row.get("gpu_ms", 1) <= 0.5] == [0.5]
    assert decoders.joined({}, again) == again
    with pytest.raises(ValueError, match="another torch: "):
        decoders.joined({**result, "torch": "3.0"}, again)


def test_the_pages_have_the_figures_that_are_kept() -> None:
    kept = figures_table.GENERATE
    for page, text_of in figures_table.DECODERS.items():
        text = f"No figures are kept yet: `{decoders.COMMAND}` measures them.\n"
        if kept.exists():
            text = text_of(json.loads(kept.read_text()))
        assert figures_table.between(page.read_text()) == text


def test_the_short_table_has_no_column_without_a_figure(result: dict[str, Any]) -> None:
    result["rows"] = [row for row in result["rows"] if row["part"] == "step"]
    head, _, last = decoders.short_section(result).splitlines()
    assert [cell.strip() for cell in head.split("|")[3:-1]] == [
        "GPU, `reduce-overhead`",
        "GPU, cgcompile",
    ]
    assert last == "| llama-1b-like | 0.58 / 0.58 | 1.61 / 1.68 | 0.81 / 0.88 |"


def test_a_result_is_written_to_both_pages(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = dict(zip(("a.md", "b.md"), figures_table.DECODERS.values(), strict=True))
    for name in pages:
        (tmp_path / name).write_text(f"{figures_table.BEGIN}\nold\n{figures_table.END}\n")
    monkeypatch.setattr(figures_table, "GENERATE", tmp_path / "kept.json")
    files = {tmp_path / name: text_of for name, text_of in pages.items()}
    monkeypatch.setattr(figures_table, "DECODERS", files)
    (tmp_path / "new.json").write_text(json.dumps(result))
    assert figures_table.main([str(tmp_path / "new.json")]) == 0
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["rows"][0]["gpu_ms"] == 1.61
    assert not [row for row in kept["rows"] if "failure" in row]
    assert not [row for row in kept["rows"] if "timeline" in row]
    for page, text_of in files.items():
        assert figures_table.between(page.read_text()) == text_of(result)


# ---------------------------------------------------------------- kernels

NAMES = {
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "products",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16>": "products",
    "void cublasLt::splitKreduce_kernel<32, 16>": "products",
    "project": "products",
    "project_row": "products",
    "rotate_and_cache": "rest",
    "triton_red_fused__to_copy_mm_0": "products",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": "attention",
    "flash_fwd_splitkv_kernel": "attention",
    "triton_poi_fused_clone_expand_unsqueeze_view_3": "attention",
    "triton_poi_fused_index_copy_2": "rest",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_4": "rest",
    "Memcpy DtoD (Device -> Device)": "rest",
}


def test_kernels_have_kinds_by_name() -> None:
    from rivals.kernels import Kernel, by_kind

    kernels = [Kernel(name, 500.0 * place, 500.0) for place, name in enumerate(NAMES)]
    assert {kernel.name: kernel.kind for kernel in kernels} == NAMES
    assert by_kind(kernels, 2) == {"products": 1.5, "attention": 0.75, "rest": 1.0}


def test_kinds_together_are_the_time_in_which_the_device_was_busy() -> None:
    from rivals.kernels import Kernel, by_kind

    step = [Kernel("project", 0, 4000), Kernel("attend_keys", 1000, 5000)]
    step += [Kernel("copy", 2000, 3000), Kernel("project", 7000, 1000)]
    assert by_kind(step, 1) == {"products": 5.0, "attention": 2.0, "rest": 0.0}


def test_a_timeline_has_the_gaps_between_kernels() -> None:
    from rivals.kernels import Kernel, gaps, timeline_table

    step = [Kernel("project", 0, 4), Kernel("copy", 5, 2), Kernel("project", 6, 4)]
    assert gaps(step) == [0, 1, -1]
    _, *rows, last = timeline_table([*step, Kernel("copy", 13, 2)], 1)
    assert rows == [
        ["project", "products", "2", "4.00", "8.0", "-0.50"],
        ["copy", "rest", "2", "2.00", "4.0", "2.00"],
    ]
    assert last == ["all", "", "4", "", "12.0", "4.0 in all"]
