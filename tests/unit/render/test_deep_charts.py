"""Deep measurements as rows of dots, in which the odd one is named."""

from __future__ import annotations

from clusterctl.health.deep.measurements import Measure, Measurement
from clusterctl.render.deep_charts import make_dot_rows


def measured(*values: float, measure: Measure = Measure.GEMM_TFLOPS) -> list[Measurement]:
    return [
        Measurement(node=f"n{index}", gpu=0, measure=measure, model="H100", variant="bfloat16", value=value)
        for index, value in enumerate(values)
    ]


def test_the_odd_one_is_named_and_stands_left_of_the_others() -> None:
    (row,) = make_dot_rows(measured(640, 632, 320, 645))

    assert (row.title, row.top, row.odd) == ("GEMM, TFLOP/s · bfloat16 · H100", "1000", "n2 GPU 0: 320")
    assert [(dot.text, dot.is_odd) for dot in row.dots][:2] == [("n2 GPU 0: 320", True), ("n1 GPU 0: 632", False)]
    assert sorted(dot.x for dot in row.dots) == [dot.x for dot in row.dots]


def test_each_measure_has_its_row_and_a_single_value_has_none() -> None:
    pair = Measurement(node="a", peers=("b",), measure=Measure.PAIR_ALL_REDUCE, value=47.0)
    others = [pair, *measured(1980, 1975, measure=Measure.CLOCK), *measured(50, measure=Measure.HOST_TO_DEVICE)]
    failed = Measurement(node="n9", measure=Measure.GEMM_TFLOPS, detail="timeout")

    assert [row.title[:5] for row in make_dot_rows([*measured(640, 650), failed, *others])] == ["GEMM,", "clock"]
