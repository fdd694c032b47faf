"""Tests of cases, contenders, gate and rows: what is timed is equal and what it says; no time is asserted."""

import dataclasses
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import builtin
import scratch
from benchmarks import contenders, environment, measuring, peers, running
from benchmarks.contenders import CONTENDERS, Contender, contenders_of
from benchmarks.environment import after_load, environment_of
from benchmarks.equality import Gate, compared_case
from benchmarks.fitting import fitted
from benchmarks.grids import COMPONENTS, MASKS, PRESETS, SETTINGS, Case, Grid, cases_of, label_of
from benchmarks.measuring import MachineRates, Runner, machine_rates, peak_memory_bytes, rounds_in_turns, turn_seconds
from benchmarks.peers import PEERS
from benchmarks.running import run_case
from benchmarks.work import flops
from benchmarks.workloads import Workload, gradients_of, runnable, workload
from scratch import tiling

# torch.nn's own encoder says that an odd number of heads keeps it off a part of its fast path.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")

ON_CPU = [name for name in CONTENDERS if name not in ("efficient", "cudnn", "flex", "scratch triton")]


NEEDS_COMPILER = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++")), reason="torch.compile needs a C++ compiler"
)


def case_of(component: str, **settings: Any) -> Case:
    """Make the case that a grid would."""
    grid = Grid((component,), batch=(2,), length=(5,), key_len=(7,), width=(33,), heads=(3,), layers=(1,))
    (case,) = cases_of([replace(grid, **{name: (value,) for name, value in settings.items()})], [1], ["cpu"])
    return case


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take as few rounds as there can be, of one run each."""
    monkeypatch.setattr(measuring, "FEWEST_ROUNDS", 2)
    monkeypatch.setattr(measuring, "MOST_ROUNDS", 2)
    monkeypatch.setattr(measuring, "FEWEST_LONG_ROUNDS", 2)
    monkeypatch.setattr(measuring, "TURN_SECONDS", 0.0)


class TestCases:
    def test_every_preset_gives_each_case_once(self) -> None:
        for grids in PRESETS.values():
            cases = cases_of(grids, [1], ["cpu"])
            assert len(set(cases)) == len(cases)

    def test_what_a_component_does_not_have_is_turned_off(self) -> None:
        assert not case_of("encoder_layer", need_weights=True).need_weights
        assert case_of("encoder_layer").key_len == 5
        assert case_of("self_attention").num_layers == 0
        assert case_of("generate", mode="backward").mode == "forward"
        assert not case_of("generate", compiled=True).compiled
        assert [case_of("seq2seq", mask=x).mask for x in MASKS] == ["causal", "causal", "both", "both", "causal"]
        assert [case_of("attention", mask=x).window for x in MASKS] == [0, 0, 0, 0, 256]
        assert case_of("generate", mask="window").window == 0

    def test_a_function_has_no_training_step(self) -> None:
        assert case_of("attention", mode="training_step").mode == "backward"

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"component": ("elephant",)}, "component must be one of 'attention', .*got 'elephant'"),
            ({"mode": ("sideways",)}, "mode must be one of .*got 'sideways'"),
            ({"dtype": ("int8",)}, "dtype must be one of .*got 'int8'"),
            ({"mask": ("some",)}, "mask must be one of .*got 'some'"),
            ({"length": (0,)}, "length must be greater than 0"),
            ({"window": (0,)}, "window must be greater than 0"),
            ({"batch": (-1,)}, "batch must be greater than 0"),
            ({"heads": (7,)}, "embed_dim must be divisible by num_heads, got embed_dim=512 and num_heads=7"),
        ],
    )
    def test_what_cannot_be_is_named(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            cases_of([replace(Grid(("attention",)), **settings)], [1], ["cpu"])


def other_values() -> list[tuple[str, Any]]:
    """Give another value for each field of a case."""
    found = {
        "component": "self_attention",
        "mode": "backward",
        "dtype": "bfloat16",
        "mask": "causal",
        "device": "cuda:1",
    }
    fields = {x.name: getattr(Case("attention"), x.name) for x in dataclasses.fields(Case)}
    return [
        (name, found[name] if name in found else not x if isinstance(x, bool) else x + 1) for name, x in fields.items()
    ]


class TestLabels:
    @pytest.mark.parametrize(("name", "value"), other_values())
    def test_two_cases_that_differ_are_called_differently(self, name: str, value: Any) -> None:
        case = Case("attention")
        other = replace(case, **{name: value})
        assert str(other) != str(case)
        if name in SETTINGS:
            assert label_of(other, [name]) != label_of(case, [name])

    def test_windows_are_told_apart(self) -> None:
        narrow, wide = (Case("attention", mask="window", window=window) for window in (2, 3))
        assert label_of(narrow, ("window",)) == "window of 2"
        assert label_of(narrow, ("mask",)) == label_of(wide, ("mask",)) == "window mask"
        assert str(narrow).endswith("float32, window of 2, 1 thread")


class TestFitting:
    @pytest.mark.parametrize("preset", PRESETS)
    def test_a_faster_machine_gets_longer_sequences(self, preset: str) -> None:
        def work(flops_per_s: float) -> int:
            return sum(map(flops, cases_of(fitted(PRESETS[preset], flops_per_s), [1], ["cpu"])))

        amounts = [work(rate) for rate in (1e6, 1e9, 1e12, 1e15)]
        assert amounts == sorted(amounts)
        assert amounts[0] < amounts[-1]

    def test_nothing_takes_long_and_nothing_vanishes(self) -> None:
        for rate in (1e11, 1e12, 1e13):
            cases = cases_of(fitted(PRESETS["quick"], rate), [1], ["cpu"])
            assert max(map(flops, cases)) / rate <= 0.02
        assert min(case.query_len for case in cases_of(fitted(PRESETS["quick"], 1.0), [1], ["cpu"])) > 1

    def test_decoding_is_not_made_longer(self) -> None:
        grids = [Grid(("generate",), length=(32,), batch=(1,)), Grid(("attention",), length=(32,), batch=(1,))]
        assert [grid.length for grid in fitted(grids, 1e15)] == [(32,), (512,)]


class TestWorkloads:
    @pytest.mark.parametrize("component", COMPONENTS)
    def test_both_packages_hold_the_same_weights_and_inputs(self, component: str) -> None:
        ours, theirs = (workload(case_of(component), package) for package in (scratch, builtin))
        left, right = ours.leaves(), theirs.leaves()
        assert list(left) == list(right)
        assert all(torch.equal(left[name], right[name]) for name in left)

    def test_torchs_own_holds_them_too_and_checks_nothing(self) -> None:
        case = case_of("decoder_layer")
        ours, plain = (CONTENDERS[name].prepare(case) for name in ("builtin", "torch.nn"))
        assert type(plain.module) is nn.TransformerDecoderLayer
        assert all(torch.equal(x, y) for x, y in zip(ours.call(), plain.call(), strict=True))
        function = CONTENDERS["torch.nn"].prepare(case_of("attention"))
        q, k, v = function.inputs.values()
        assert torch.equal(function.call()[0], nn.functional.scaled_dot_product_attention(q, k, v))

    @pytest.mark.parametrize("mask", ["causal", "padding", "both", "window"])
    @pytest.mark.parametrize("component", [x for x in COMPONENTS if x not in ("seq2seq", "generate")])
    def test_masks_hide_what_they_say(self, component: str, mask: str) -> None:
        case = case_of(component, mask=mask, window=2, dtype="float64")
        work = workload(case, builtin)
        seen_from_first = torch.autograd.grad(work_output(work, requires=True)[0, ..., 0, :].sum(), leaf(work))[0]
        keys = seen_from_first.abs().sum(-1)[0]  # of sample 0
        keys = keys.sum(0) if component == "attention" else keys
        if mask in ("causal", "both", "window") and component in (
            "attention",
            "cross_attention",
            "self_attention",
            "encoder_layer",
        ):
            assert (keys[1:] == 0).all()
        if mask == "padding":
            hidden = case.key_len // 4  # a quarter of sample 0, a half of sample 1
            assert (keys[case.key_len - hidden :] == 0).all()
            assert (keys[: case.key_len - hidden] != 0).all()

    @pytest.mark.parametrize("component", ["attention", "self_attention", "cross_attention", "encoder_layer"])
    def test_a_window_hides_what_is_far_back(self, component: str) -> None:
        work = workload(case_of(component, mask="window", window=2, dtype="float64", batch=1), builtin)
        output = work_output(work, requires=True)
        seen = torch.autograd.grad(output[..., 3, :].sum(), leaf(work))[0].abs().sum(-1).flatten(0, -2).sum(0)
        assert [i for i, x in enumerate(seen.tolist()) if x] == [2, 3]

    def test_modes_do_what_they_say(self) -> None:
        case = case_of("self_attention", mode="training_step")
        work = workload(case, scratch)
        before = {name: x.clone() for name, x in work.leaves().items()}
        runnable(case, work)()
        changed = {name for name, x in work.leaves().items() if not torch.equal(x, before[name])}
        assert all(x.grad is None for x in work.leaves().values())
        assert changed == {name for name in before if name != "query"}
        gradients = gradients_of(replace(case, mode="backward"), work)
        assert set(gradients) == {f"gradient of {name}" for name in before}
        assert all(x is not None for x in gradients.values())

    def test_weights_come_out_where_they_are_asked_for(self) -> None:
        shapes = [
            [tuple(x.shape) for x in workload(case_of("cross_attention", need_weights=wanted), scratch).call()]
            for wanted in (False, True)
        ]
        assert shapes == [[(2, 5, 33)], [(2, 5, 33), (2, 5, 7)]]


def leaf(work: Workload) -> Tensor:
    """Give the input that is attended to."""
    return list(work.inputs.values())[0 if "src" in work.inputs else min(1, len(work.inputs) - 1)]


def work_output(work: Workload, requires: bool) -> Tensor:
    leaf(work).requires_grad_(requires)
    return work.call()[0]


class TestContenders:
    def test_who_takes_part(self) -> None:
        def names(component: str, **settings: Any) -> list[str]:
            return [x.name for x in contenders_of(case_of(component, **settings), ON_CPU)]

        everybody = ["builtin", "torch.nn", "scratch"]
        assert names("attention") == names("attention", mask="causal") == [*everybody, "math", "flash", *PEERS]
        assert names("attention", compiled=True) == names("attention", key_heads=1) == [*everybody, "math", "flash"]
        assert names("attention", mask="padding") == [*everybody, "scratch packed", "math", "flash"]
        assert names("self_attention") == [*everybody, "plain path", "math", "flash"]
        assert names("self_attention", need_weights=True) == [*everybody, "plain path"]
        assert names("self_attention", mode="backward") == everybody
        assert names("encoder_layer", mode="backward") == everybody
        assert names("seq2seq") == ["builtin", "scratch", "plain path"]
        assert names("generate") == ["builtin", "scratch", "scratch recomputed"]
        assert [x.name for x in contenders_of(case_of("attention"), ["scratch"])] == ["builtin", "scratch"]

    @pytest.mark.parametrize("name", PEERS)
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_peers_compute_attention(self, monkeypatch: pytest.MonkeyPatch, name: str, is_causal: bool) -> None:
        monkeypatch.setattr(peers, "CHUNK", 2)
        q, k, v = (torch.randn(2, 3, length, 11, dtype=torch.float64) for length in (5, 7, 7))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        torch.testing.assert_close(PEERS[name](q, k, v, is_causal), expected)

    def test_without_tiles_scratch_is_the_textbook(self, monkeypatch: pytest.MonkeyPatch) -> None:
        short, long = case_of("self_attention", length=511), case_of("self_attention", length=512)
        assert "scratch textbook" not in [x.name for x in contenders_of(short, ON_CPU)]
        assert "scratch textbook" in [x.name for x in contenders_of(long, ON_CPU)]
        for left_out in ({"need_weights": True}, {"compiled": True}, {"device": "cuda"}, {"component": "generate"}):
            assert "scratch textbook" not in [x.name for x in contenders_of(replace(long, **left_out), ON_CPU)]
        tiles: list[str] = []
        attend = tiling.tiled_attention

        def record(*arguments: Any, **keywords: Any) -> Tensor:
            tiles.append("tiles")
            return attend(*arguments, **keywords)

        monkeypatch.setattr(tiling, "tiled_attention", record)
        counts = []
        for name in ("scratch", "scratch textbook", "scratch"):
            with CONTENDERS[name].switches():
                runnable(long, CONTENDERS[name].prepare(long))()
            counts.append(len(tiles))
        assert counts == [1, 1, 2]

    def test_a_kernel_of_scratchs_is_switched_on_where_it_takes_over(self) -> None:
        def takes_part(component: str, **settings: Any) -> bool:
            case = Case(component, query_len=512, key_len=512, device="cuda")
            return CONTENDERS["scratch triton"].takes_part(replace(case, **settings))

        assert takes_part("attention", mask="causal")
        assert takes_part("encoder_layer")
        assert not any(takes_part("self_attention", mask=mask) for mask in ("causal", "padding"))
        for left_out in ({"need_weights": True}, {"compiled": True}, {"device": "cpu"}, {"query_len": 511}):
            assert not takes_part("self_attention", **left_out)
        switched: list[str] = []

        @contextmanager
        def kernel() -> Iterator[None]:
            switched.append("on")
            yield
            switched.append("off")

        with Contender("mine", "", CONTENDERS["scratch"].prepare, kernel=kernel).switches():
            assert switched == ["on"]
        assert switched == ["on", "off"]

    def test_the_fast_path_is_taken_by_one_and_not_by_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        taken: list[bool] = []
        native = torch._native_multi_head_attention

        def record(*arguments: Any, **keywords: Any) -> Any:
            taken.append(True)
            return native(*arguments, **keywords)

        monkeypatch.setattr(torch, "_native_multi_head_attention", record)
        case = Case("self_attention", batch=2, query_len=5, key_len=5, embed_dim=32, num_heads=2)
        counts = []
        for name in ("builtin", "torch.nn", "plain path", "math", "scratch"):
            taken.clear()
            with CONTENDERS[name].switches():
                runnable(case, CONTENDERS[name].prepare(case))()
            counts.append(len(taken))
        assert counts == [1, 1, 0, 0, 0]

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside of torch.compile
    @pytest.mark.parametrize(
        ("component", "is_compiled"),
        [("attention", False), ("self_attention", False), pytest.param("attention", True, marks=NEEDS_COMPILER)],
    )
    def test_a_kernel_is_held_to(self, component: str, is_compiled: bool) -> None:
        """Compiled code too is each contender's own: it stays with the kernel that it was compiled for."""
        case = case_of(component, compiled=is_compiled, heads=1)
        with running._nothing_compiled():
            found = [CONTENDERS[name] for name in ("flash", "math")]
            runs = [_under_its_switches(x, case) for x in found]
            for run in runs:
                run()
            kernels = [set(_called(run)) & {"aten::_scaled_dot_product_flash_attention_for_cpu"} for run in runs]
        assert [len(x) for x in kernels] == [1, 0]


def _under_its_switches(contender: Contender, case: Case) -> Callable[[], object]:
    run = runnable(case, contender.prepare(case))

    def held() -> object:
        with contender.switches():
            return run()

    return held


def _called(run: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(acc_events=True) as profiler:
        run()
    return [x.name for x in profiler.events()]


def broken(change: Callable[[Tensor], Tensor]) -> Contender:
    """Make a contender of scratch whose output is changed, gradients included."""

    def prepare(case: Case) -> Workload:
        work = workload(case, scratch)
        call = work.call
        return replace(work, call=lambda: tuple(change(x) for x in call()))

    return Contender("broken", "", prepare)


class TestGate:
    @pytest.mark.parametrize("mask", ["none", "both", "window"])
    @pytest.mark.parametrize("mode", ["forward", "backward"])
    @pytest.mark.parametrize("component", COMPONENTS)
    def test_all_contenders_are_equal(self, component: str, mode: str, mask: str) -> None:
        case = case_of(component, mode=mode, mask=mask, window=2)
        gate = Gate(case)
        assert {x.name: gate.objection(x) for x in contenders_of(case, ON_CPU)} == dict.fromkeys(
            (x.name for x in contenders_of(case, ON_CPU)), ""
        )

    @pytest.mark.parametrize("mode", ["forward", "backward"])
    @pytest.mark.parametrize("mask", ["none", "padding", "window"])
    def test_with_shared_heads_of_keys_and_packed_all_are_equal(self, mask: str, mode: str) -> None:
        case = case_of("attention", mode=mode, mask=mask, window=2, width=36, heads=6, key_heads=2)
        gate, chosen = Gate(case), contenders_of(case, ON_CPU)
        assert [gate.objection(x) for x in chosen if x.name not in ("math", "flash")] == [""] * 3 + [""] * (
            mask == "padding"
        )

    @pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
    def test_in_every_dtype(self, dtype: str) -> None:
        case = case_of("encoder_layer", mode="backward", dtype=dtype)
        assert Gate(case).objection(CONTENDERS["scratch"]) == ""

    @pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-9), ("float32", 1e-4), ("bfloat16", 0.2)])
    def test_a_wrong_output_is_found(self, dtype: str, error: float) -> None:
        gate = Gate(case_of("self_attention", dtype=dtype))
        assert gate.objection(broken(lambda x: x * (1 + error))).startswith("output")

    def test_a_wrong_gradient_behind_a_right_output_is_found(self) -> None:
        gate = Gate(case_of("self_attention", mode="backward"))
        objection = gate.objection(broken(lambda x: x.detach() + 0.5 * (x - x.detach())))
        assert objection.startswith("gradient of ")

    def test_a_missing_gradient_and_another_shape_are_found(self) -> None:
        gate = Gate(case_of("cross_attention", mode="backward"))
        assert "shape" in gate.objection(broken(lambda x: x[:1]))

    def test_gradients_behind_a_relu_are_compared_in_float64(self) -> None:
        """In float32 rounding moves a few of many hidden units across 0, and their gradient jumps."""
        dtypes = {
            component: [x.case.dtype for x in Gate(case_of(component, mode="backward"))._yardsticks]
            for component in ("self_attention", "encoder_layer")
        }
        assert dtypes == {"self_attention": ["float32", "float32"], "encoder_layer": ["float32", "float64"]}
        gate = Gate(case_of("encoder_layer", mode="backward"))
        slightly = broken(lambda x: x.detach() + (1 + 1e-9) * (x - x.detach()))
        assert gate.objection(slightly).startswith("gradient of ")

    def test_very_long_sequences_are_compared_at_a_shorter_length(self) -> None:
        case = Case("attention", batch=1, num_heads=8, query_len=4096, key_len=512)
        assert compared_case(case).query_len == 2048
        assert compared_case(case).key_len == 512
        assert compared_case(replace(case, query_len=512)) == replace(case, query_len=512)
        decoding = Case("generate", batch=1, query_len=256, key_len=16, num_layers=1)
        assert compared_case(decoding) == replace(decoding, query_len=64, dtype="float64")


class TestRunCase:
    def test_rows_hold_all_that_was_measured(self) -> None:
        case = case_of("cross_attention")
        rows = {row.contender: row for row in run_case(case, ["scratch"], 0.0)}
        assert list(rows) == ["builtin", "scratch"]
        for row in rows.values():
            assert row.status == "timed"
            assert len(row.rounds_us) == 2
            assert min(row.rounds_us) > 0
            assert row.median_us == pytest.approx(statistics.median(row.rounds_us), rel=1e-3)
            assert row.peak_memory_bytes is not None
            assert row.peak_memory_bytes >= 4 * 2 * 5 * 33
            assert row.flops_per_s == pytest.approx(row.flops / (row.median_us or 1) * 1e6, rel=1e-3)
            assert row.compared_query_len == 5
            assert row.environment.torch == torch.__version__
        assert rows["builtin"].ratio_to_builtin == 1.0
        ratios = [a / b for a, b in zip(rows["scratch"].rounds_us, rows["builtin"].rounds_us, strict=True)]
        ours = rows["scratch"]
        assert ours.ratio_to_builtin is not None
        assert min(ratios) * 0.99 <= ours.ratio_to_builtin <= max(ratios) * 1.01

    def test_what_is_not_equal_is_not_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        called: list[int] = []

        def change(x: Tensor) -> Tensor:
            called.append(1)
            return x + 1

        monkeypatch.setitem(contenders.CONTENDERS, "broken", broken(change))
        rows = run_case(case_of("self_attention"), ["scratch", "broken"], 0.0)
        assert [row.status for row in rows] == ["timed", "timed", "unequal"]
        assert rows[-1].median_us is None
        assert "output" in rows[-1].detail
        assert len(called) == 1

    def test_too_little_memory_and_what_cannot_run_are_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def greedy(case: Case) -> Workload:
            torch.empty(2**60, dtype=torch.uint8)
            raise AssertionError

        def far_too_greedy(case: Case) -> Workload:
            torch.empty(2**40, 2**40)
            raise AssertionError

        def absent(case: Case) -> Workload:
            raise NotImplementedError("no kernel for this\nand more")

        monkeypatch.setitem(contenders.CONTENDERS, "greedy", Contender("greedy", "", greedy))
        monkeypatch.setitem(contenders.CONTENDERS, "greedier", Contender("greedier", "", far_too_greedy))
        monkeypatch.setitem(contenders.CONTENDERS, "absent", Contender("absent", "", absent))
        rows = run_case(case_of("attention"), ["greedy", "greedier", "absent"], 0.0)
        assert [row.status for row in rows] == ["timed", "out of memory", "out of memory", "unavailable"]
        assert rows[3].detail == "no kernel for this"

    def test_without_the_built_in_nothing_can_be_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: Any, *arguments: Any, **keywords: Any) -> None:
            raise RuntimeError("not on Tuesdays")

        monkeypatch.setattr(nn.MultiheadAttention, "forward", fail)
        rows = run_case(case_of("self_attention"), ["scratch"], 0.0)
        assert [(row.contender, row.status) for row in rows] == [("builtin", "unavailable"), ("scratch", "unavailable")]

    def test_the_number_of_threads_is_put_back(self) -> None:
        before = torch.get_num_threads()
        running.run_case(replace(case_of("attention"), threads=before + 1), ["scratch"], 0.0)
        assert torch.get_num_threads() == before


class TestMeasuring:
    def runner(self, run: Callable[[], object]) -> Runner:
        return Runner(run, nullcontext, 1, torch.device("cpu"))

    def test_rounds_are_taken_in_turns(self) -> None:
        order: list[str] = []
        runners = [self.runner(lambda name=name: order.append(name)) for name in "AB"]  # type: ignore[misc]
        times = rounds_in_turns(runners, 1e9)
        turns = "".join(name for i, name in enumerate(order) if i == 0 or order[i - 1] != name)
        assert turns.startswith("ABAB")
        assert set(turns[::2]) == {"A"}
        assert len(times[0]) == len(times[1])

    def test_unstable_timings_are_taken_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = iter([9.0, 1.0, 3.0, 1.0, 1.01])  # the first is to warm up
        monkeypatch.setattr(measuring, "turn_seconds", lambda *_: next(seconds))
        assert rounds_in_turns([self.runner(int)], 1e9) == [[1.0, 1.01]]

    def test_where_a_round_takes_long_none_is_thrown_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measuring, "FEWEST_LONG_ROUNDS", 3)
        seconds = iter([9.0, 1.0, 3.0, 1.0])
        monkeypatch.setattr(measuring, "turn_seconds", lambda *_: next(seconds))
        assert rounds_in_turns([self.runner(int)], 0.0) == [[9.0, 1.0, 3.0]]

    def test_a_turn_is_a_single_run_where_that_takes_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runs: list[int] = []
        monkeypatch.setattr(measuring, "LONG_TURN_SECONDS", 0.0)
        assert turn_seconds(self.runner(lambda: runs.append(torch.get_num_threads()))) > 0
        assert runs == [1]
        monkeypatch.setattr(measuring, "LONG_TURN_SECONDS", 1e9)
        turn_seconds(replace(self.runner(lambda: runs.append(torch.get_num_threads())), threads=3))
        assert len(runs) > 2
        assert set(runs[1:]) == {3}

    def test_peak_memory_is_what_lives_at_a_time(self) -> None:
        def run() -> Tensor:
            for _ in range(3):
                kept = torch.empty(1000, dtype=torch.float64)
                freed = kept + 1
                del freed
            return kept

        assert 16_000 <= peak_memory_bytes(self.runner(run)) < 33_000
        assert peak_memory_bytes(self.runner(lambda: None)) == 0

    def test_the_rate_is_the_best_of_all_sizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measuring, "_best_seconds", lambda *_: 2.0)
        monkeypatch.setattr(measuring, "_product_seconds", lambda size, *_: {256: 1.0, 512: 1e-3, 1024: 1.0}[size])
        rates = machine_rates.__wrapped__("float32", 1, torch.device("cpu"))
        assert rates == MachineRates(2 * 512**3 / 1e-3, 2**27)

    def test_on_cuda_events_stand_around_the_run_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        happened: list[str] = []

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                happened.append("event")

            def elapsed_time(self, end: "Event") -> float:
                assert happened[-1] == "synchronize"
                return 4.0  # milliseconds

        class Filler:
            def zero_(self) -> None:
                happened.append("flush")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: happened.append("synchronize"))
        monkeypatch.setattr(measuring, "_l2_filler", lambda _: Filler())
        monkeypatch.setattr(measuring, "TURN_SECONDS", 0.01)
        runner = Runner(lambda: happened.append("run"), nullcontext, 1, torch.device("cuda:1"))
        assert turn_seconds(runner) == pytest.approx(4e-3)
        once = ["flush", "event", "run", "event"]
        assert happened == ["run", *once, "synchronize", *once, *once, "synchronize"]

    def test_the_gpu_that_is_measured_is_the_current_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        current: list[str] = []

        @contextmanager
        def make_current(device: torch.device) -> Iterator[None]:
            current.append(str(device))
            yield
            current.pop()

        def gate(case: Case) -> None:
            assert current == ["cuda:1"]
            raise NotImplementedError("far enough")

        monkeypatch.setattr(torch.cuda, "device", make_current)
        monkeypatch.setattr(running, "Gate", gate)
        monkeypatch.setattr(running, "environment_of", lambda _: environment_of(torch.device("cpu")))
        (row,) = run_case(replace(case_of("attention"), device="cuda:1"), [], 0.0)
        assert (row.detail, current) == ("far enough", [])

    def test_the_state_of_the_gpu_is_noted_after_the_last_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environment, "_gpu_state", lambda device: f"{device} is warm")
        before = environment_of(torch.device("cpu"))
        assert after_load(before, torch.device("cpu")) == before
        assert after_load(before, torch.device("cuda:1")) == replace(before, gpu_state="cuda:1 is warm")
        monkeypatch.setattr(running, "after_load", lambda found, _: replace(found, gpu_state="warm"))
        assert {row.environment.gpu_state for row in run_case(case_of("attention"), ["scratch"], 0.0)} == {"warm"}

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    @pytest.mark.parametrize("component", ["attention", "self_attention", "encoder_layer"])
    def test_on_cuda(self, component: str) -> None:
        case = replace(case_of(component, dtype="float16"), device="cuda", embed_dim=192)
        rows = run_case(case, [name for name in CONTENDERS if name != "flex"], 0.1)
        assert {row.status for row in rows} <= {"timed", "unavailable"}
        assert [row.status for row in rows[:2]] == ["timed", "timed"]
        assert all(row.peak_memory_bytes for row in rows if row.status == "timed")
        assert "clocks.sm" in rows[0].environment.gpu_state
