"""The paper's own numbers, to be printed beside measured ones. Nothing here was measured by this program."""

from __future__ import annotations

from dataclasses import dataclass

# The columns of Table 1's left half, in its order, by the names of tasks/mad.py.
TASKS = ("compression", "fuzzy-recall", "in-context-recall", "memorization", "noisy-recall", "selective-copying")
THRESHOLDS = (3.3, 3.2, 3.1, 3.0)  # of the NanoGPT loss


@dataclass(frozen=True)
class Table1Row:
    """One label: accuracies in percent, NanoGPT loss, evaluations until the loss fell below each threshold (None: never)."""

    accuracy: dict[str, float]
    average: float
    loss: float
    evaluations: dict[float, int | None]


# Label, six accuracies, their mean, loss (mean of the last five evaluations), evaluations until loss < 3.3, 3.2, 3.1, 3.0.
TABLE1_TEXT = """
    S           35.19  8.92  83.68 29.24  85.03 62.08 50.69 3.9487 18  -  -  -
    S-p         44.69 34.74  93.43 78.65  86.32 96.42 72.38 3.0669 11 20 47  -
    S-c         41.31 62.44  99.99 78.31  99.99 51.05 72.18 3.0897 15 27 64  -
    S-pc        51.62 51.10  99.99 86.81  99.99 91.39 80.15 3.0466 11 19 39  -
    R           34.87  9.70  74.19 15.64  77.53 53.91 44.31 3.2573 50  -  -  -
    R-p         43.35 31.38  93.65 68.83  92.81 97.34 71.23 3.0785 13 22 54  -
    R-c         39.91 43.85  99.99 57.70  99.99 72.85 69.05 3.1070 17 31 80  -
    R-pc        44.41 61.26 100.00 79.20  99.99 98.11 80.50 3.0481 11 19 37  -
    S-g-q       39.08 51.52  99.99 78.51  99.99 54.88 70.66 3.0428 13 20 41  -
    R-cg-q      36.49 32.57  100.0 57.70  99.99 73.90 66.78 3.0828 16 29 76 80
    R-c-12o!    49.23 65.12  100.0 71.24  99.99 99.31 80.81 3.0590 10 17 36  -
    R-cg-q-12o  49.20 62.76  99.99 74.97  99.99 99.14 81.01 2.9956  9 14 26 72
    R-pcg-q-12o 47.86 36.22  99.99 66.06  99.99 99.29 74.90 3.0212 10 15 28 75
    S-c-q       40.42 60.37  99.99 77.53  99.99 44.30 70.43 3.1042 16 29 78  -
    S-c-v       33.57 57.87  99.99 77.23  99.99 52.89 70.26 3.1384 18 33  -  -
    R-c-q       37.28 36.27  99.99 55.98 100.00 74.33 67.31 3.1762 22 55  -  -
    R-c-v       31.84 43.47 100.00 65.58  99.99 70.36 68.54 3.1323 20 44 80  -
    G-cg-q      38.56 35.84  99.99 66.73  99.99 75.23 69.39 3.0530 12 21 42  -
    G-c-12o!    49.81 65.77 100.00 72.98 100.00 99.67 81.37 3.0159  9 15 28 80
    G-cg-q-12o  49.60 61.50  99.99 76.07  99.99 99.58 81.12 2.9865  8 13 22 58
    G-pcg-q-12o 49.90 29.12  99.98 70.35  99.99 99.28 74.77 2.9974  9 13 25 77
    G-cg-q-1o   47.35 49.90  99.99 69.66  99.99 99.75 77.77 2.9907  9 13 24 68
    R-cg-q-1o   47.34 57.69  99.99 70.62  99.99 98.97 79.10 3.0001  9 14 24 75
    G-g-q-12o   50.49 58.88  99.99 76.95  99.97 99.25 80.92 2.9980  9 14 24 74
    R-g-q-12o   49.14 61.98  99.99 73.55  99.97 99.06 80.61 3.0130 10 16 30  -
    G-12o!      49.65 49.56  99.97 72.38  99.85 99.72 78.52 3.0386 12 17 33  -
    G-1o!       47.15 32.11  99.96 71.72  99.96 99.67 75.09 3.0556 12 20 39  -
    G-2o!       48.07 68.35  99.95 52.55  99.97 96.52 77.57 3.0631 16 27 55  -
    R-12o!      49.36 61.37  99.95 82.01  99.97 99.28 81.82 3.0497 11 17 36  -
    R-1o!       44.70 60.51  99.94 77.17  99.97 99.43 80.24 3.0699 12 20 47  -
    R-2!        45.28 64.03  99.97 75.75  99.85 96.05 80.16 3.1022 17 30 72  -
    G-12!       47.44  6.81  55.75 16.45  54.87 95.74 46.18 4.3662  -  -  -  -
    R-12!       47.71  8.02  55.60 16.28  55.27 94.78 46.27 4.3567  -  -  -  -
"""


def read_table1(text: str) -> dict[str, Table1Row]:
    rows = {}
    for line in text.strip().splitlines():
        label, *numbers = line.split()
        reached = [None if n == "-" else int(n) for n in numbers[8:]]
        rows[label] = Table1Row(
            accuracy=dict(zip(TASKS, map(float, numbers[:6]), strict=True)),
            average=float(numbers[6]),
            loss=float(numbers[7]),
            evaluations=dict(zip(THRESHOLDS, reached, strict=True)),
        )
    return rows


TABLE1 = read_table1(TABLE1_TEXT)

# Table 4: how much sequence mixing is expected to gain over the same layer without it, at equal parameters.
TABLE4 = {
    "compression": "high",
    "noisy-recall": "high",
    "fuzzy-recall": "high",
    "selective-copying": "med-high",
    "in-context-recall": "low",
    "memorization": "low",
}

# Table 2's columns: benchmark, then average rank and number of first places.
BENCHMARKS = (
    *("MMLU-P", "GPQA", "BBH", "MATH", "MuSR", "IFE-I", "IFE-P"),
    *("ARC-C", "ARC-E", "HS", "PIQA", "BoolQ", "WinoG", "COPA", "OBQA", "SciQ"),
)


@dataclass(frozen=True)
class Table2Row:
    scores: dict[str, float]
    average_rank: float
    first_places: int


# Size, model, 16 scores, average rank, first places.
TABLE2_TEXT = """
    1.3B DeltaNet        0.109 0.263 0.308 0.011 0.417 0.288 0.165 0.266 0.522 0.502 0.704 0.611 0.541 0.740 0.318 0.761 4.22 0
    1.3B GSA             0.110 0.270 0.294 0.013 0.438 0.300 0.179 0.287 0.529 0.510 0.712 0.541 0.536 0.760 0.330 0.773 2.84 4
    1.3B RetNet          0.110 0.252 0.293 0.001 0.384 0.056 0.024 0.271 0.489 0.480 0.701 0.583 0.533 0.710 0.324 0.736 6.69 0
    1.3B HGRN            0.114 0.269 0.297 0.008 0.409 0.253 0.122 0.271 0.518 0.481 0.707 0.584 0.515 0.700 0.326 0.695 5.12 0
    1.3B HGRN2           0.115 0.254 0.295 0.002 0.350 0.223 0.129 0.282 0.504 0.317 0.671 0.416 0.522 0.770 0.328 0.378 5.84 1
    1.3B SoftmaxAttn     0.114 0.259 0.296 0.011 0.365 0.270 0.141 0.280 0.492 0.492 0.705 0.621 0.552 0.760 0.318 0.769 4.22 2
    1.3B GLA             0.114 0.259 0.295 0.006 0.427 0.272 0.157 0.277 0.482 0.488 0.702 0.574 0.541 0.690 0.326 0.721 5.19 0
    1.3B HyperGLU        0.120 0.268 0.321 0.012 0.468 0.286 0.189 0.366 0.611 0.516 0.708 0.613 0.531 0.760 0.353 0.788 1.88 9
    340M DiffTrans       0.109 0.259 0.299 0.008 0.390 0.266 0.133 0.289 0.531 0.408 0.668 0.603 0.534 0.690 0.330 0.734 4.13 2
    340M GatedDeltaNet   0.110 0.260 0.296 0.010 0.421 0.258 0.133 0.276 0.527 0.396 0.662 0.588 0.527 0.710 0.338 0.735 3.81 2
    340M DeltaNet        0.112 0.260 0.300 0.009 0.452 0.277 0.150 0.269 0.502 0.405 0.653 0.519 0.504 0.690 0.316 0.717 4.81 1
    340M GLA             0.110 0.258 0.289 0.007 0.415 0.228 0.109 0.247 0.478 0.366 0.637 0.547 0.489 0.640 0.294 0.649 7.56 0
    340M SoftmaxAttn     0.106 0.267 0.292 0.010 0.386 0.269 0.126 0.273 0.506 0.396 0.650 0.569 0.499 0.720 0.324 0.727 5.28 3
    340M ReLUAttn+KVConv 0.111 0.253 0.290 0.008 0.423 0.229 0.130 0.268 0.525 0.412 0.669 0.524 0.520 0.660 0.324 0.774 5.13 1
    340M HyperMLP        0.119 0.262 0.300 0.010 0.466 0.273 0.155 0.288 0.541 0.402 0.663 0.585 0.513 0.710 0.320 0.755 2.97 4
    340M HyperGLU        0.117 0.259 0.313 0.009 0.451 0.273 0.157 0.304 0.538 0.427 0.674 0.587 0.518 0.720 0.336 0.771 2.31 6
"""


def read_table2(text: str) -> dict[str, dict[str, Table2Row]]:
    """Size → model → row."""
    rows: dict[str, dict[str, Table2Row]] = {}
    for line in text.strip().splitlines():
        size, model, *numbers = line.split()
        scores = dict(zip(BENCHMARKS, map(float, numbers[:16]), strict=True))
        rows.setdefault(size, {})[model] = Table2Row(scores, float(numbers[16]), int(numbers[17]))
    return rows


TABLE2 = read_table2(TABLE2_TEXT)


@dataclass(frozen=True)
class Table5Row:
    """One system as a whole model of GPT-2 small's size, batch 8, 1024 tokens, on an L40S: forward, then training."""

    flops: tuple[float, float]  # 10¹²
    flops_per_token: tuple[float, float]  # 10⁶
    seconds: tuple[float, float]
    tokens_per_second: tuple[float, float]  # 10³
    gigabytes: tuple[float, float]  # at the peak


TABLE5_TOKENS = 8 * 1024  # of a step
TABLE5_TEXT = """
    HyperGLU      1.50 4.50  183.27 549.76  0.0395 0.1190  207.4  68.8   8.40  8.54
    RWKV7         1.47 4.41  179.35 538.09  0.0532 0.1711  154.0  47.9  10.59 11.14
    LinAttn       1.39 4.18  169.94 509.75  0.0264 0.0775  310.0 105.7   7.00  7.11
    HGRN2         1.39 4.18  169.89 509.65  0.0295 0.0880  277.4  93.1   7.87  7.98
    SM(Naive)     1.70 5.11  207.84 623.41  0.0552 0.2689  148.5  30.5  11.18 12.10
    SM(Flash)     1.39 4.18  169.89 509.65  0.0300 0.0880  272.9  93.1   6.66  6.76
    GLA           1.70 5.11  208.03 623.90  0.0929 0.2945   88.2  27.8  16.80 18.06
    Mamba         1.28 3.84  156.33 468.97  0.0306 0.0899  267.6  91.1   7.51  7.61
    GSA           1.51 4.52  184.04 552.11  0.0378 0.1244  216.9  65.8   9.77  9.88
    PaTH          1.40 4.21  171.29 513.84  0.0349 0.1280  234.7  64.0   7.38  7.59
"""


def read_table5(text: str) -> dict[str, Table5Row]:
    rows = {}
    for line in text.strip().splitlines():
        name, *numbers = line.split()
        values = list(map(float, numbers))
        rows[name] = Table5Row(*((values[i], values[i + 1]) for i in range(0, 10, 2)))
    return rows


TABLE5 = read_table5(TABLE5_TEXT)
