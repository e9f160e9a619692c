"""Speed and memory, each as a ratio to a baseline measured in the same run: `python benchmark.py evaluate|feasibility|step|features|baselines`.

Times on shared machines are noisy: every figure is the median of `--repeat` alternating runs of both sides, and only the ratio is meant.
"""

import argparse
import time


def timed(*functions, repeat=5):
    """Median seconds of each function, called in turn `repeat` times so that noise hits all alike."""
    seconds = [[] for _ in functions]
    for _ in range(repeat):
        for function, taken in zip(functions, seconds):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [sorted(taken)[len(taken) // 2] for taken in seconds]


def main(argv=None):
    """Run the benchmarks named (all when none is)."""
    benchmarks = {name[6:]: function for name, function in globals().items() if name.startswith("bench_")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(benchmarks)} (default: all)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each side; the median counts (default 5)")
    options = parser.parse_args(argv)
    for name in options.names or benchmarks:
        if name not in benchmarks:
            parser.error(f"no benchmark {name!r}: choose from {', '.join(benchmarks)}")
        benchmarks[name](options.repeat)


if __name__ == "__main__":
    main()
