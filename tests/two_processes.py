"""The script that each of two processes runs for test_processes.py, in one start of torchrun.

python two_processes.py COMMANDS, in JSON {name: [script, arguments...]}. Each part prints to
NAME-RANK.txt in the working folder, and makes NAME-RANK.ended if it went well. The last command is
`endless`, a training that test_processes.py ends.
"""

import contextlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from unittest.mock import patch

import torch

import compcos
import evaluate
from lab import reproduce, run, shell

MAIN = {"compcos.py": compcos.main, "reproduce.py": reproduce.main}
RANK = shell.rank()


def do(name, function, *arguments):
    """Call a function that prints to NAME-RANK.txt; make NAME-RANK.ended unless an error ends it.

    A command may end in an exit status.
    """
    with open(f"{name}-{RANK}.txt", "w") as said:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                function(*arguments)
            except SystemExit as end:
                print(f"exit status {end.code}", file=said)
            except BaseException:
                traceback.print_exc(file=said)
                return
    Path(f"{name}-{RANK}.ended").touch()


def spread():
    """Check that each item is worked on once, by a process alone; both get all in order."""
    done = list(shell.distribute(range(5), lambda item: (item, RANK, shell.processes())))
    assert done == [(item, (item, item % 2, 1)) for item in range(5)], done


def unshared():
    """Check that a folder which only the first process sees is named."""
    shell.check_shared("shared")
    os.mkdir(f"of-{RANK}")
    with contextlib.chdir(f"of-{RANK}"):
        try:
            shell.check_shared("results")
        except OSError as error:
            assert str(error).startswith("results: process 1 of 2 does not see what process 0")
        else:
            raise AssertionError("both see it")


def wrong(arguments):
    """Run a wrong command; the second process gets a signal meanwhile, as torchrun sends it."""
    with patch("time.sleep", lambda seconds: signal.raise_signal(signal.SIGTERM)):
        compcos.main(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run.SAVE_SECONDS = 0.2
    evaluate.RESAMPLES = 20  # as in conftest.py
    do("spread", spread)
    do("unshared", unshared)
    commands = json.loads(sys.argv[1])
    _, *endless = commands.pop("endless")
    for name, (script, *arguments) in commands.items():
        do(name, wrong if name == "wrong" else MAIN[script], arguments)
    compcos.main(endless)
