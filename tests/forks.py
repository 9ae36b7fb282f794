"""Processes that tests start, as forks of one server: to import torch takes longer than most tests.

Each begins as a process that was just started does: with a folder and an environment of its own,
and without any module of this project.  What is asked of a process itself, such as what it
imports, is tested by a real one.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

# What takes time to import, in the order of the server.
IMPORTED = [
    *["torch", "torch._dynamo", "torchvision", "timm", "faiss", "pandas", "scipy.stats", "sklearn"],
    *["seaborn", "IPython", "ipykernel.kernelapp", "distributed", "hypothesis", "pytest"],
    *["puma_study.rows", "puma_study.runs"],
]
OURS = ("pumalib", "puma_study", "tools")


def start(work, *given):
    """A process of `work(*given)`, a function that a module of the tests has."""
    process = multiprocessing.get_context("forkserver").Process(target=work, args=given)
    process.start()
    return process


def ready():
    """Start the server now; Dask would name other modules for it to import."""
    forkserver.ensure_running()


def begin(environment, folder):
    """Become like a process that was started in a folder, with these variables."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for name in list(sys.modules):
        if name.partition(".")[0] in OURS:
            del sys.modules[name]
    given = environment.get("PYTHONPATH", "")
    sys.path[:0] = [part for part in given.split(os.pathsep) if part]
    importlib.invalidate_caches()
    if "matplotlib" in sys.modules and "MPLBACKEND" in environment:
        sys.modules["matplotlib"].rcParams["backend"] = environment["MPLBACKEND"]


class Done:
    """How a program ended, and what it wrote."""

    def __init__(self, status, stdout, stderr):
        self.returncode = status
        self.stdout = stdout
        self.stderr = stderr


class Program:
    """A program's text, run in a folder with some variables, as `python -c` does; its process."""

    def __init__(self, text, folder=None, environment=None):
        self.written = tempfile.TemporaryDirectory()
        files = [str(Path(self.written.name, name)) for name in ("stdout", "stderr")]
        given = dict(os.environ if environment is None else environment)
        self.process = start(_program, text, str(folder or Path.cwd()), given, files)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.join()
        self.written.cleanup()

    def done(self, seconds=600):
        """Wait for its end."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s"
        texts = [Path(self.written.name, name).read_text("utf-8") for name in ("stdout", "stderr")]
        return Done(self.process.exitcode, *texts)


def run(text, folder=None, environment=None):
    """The end of a program, and what it wrote."""
    with Program(text, folder, environment) as program:
        return program.done()


def _program(text, folder, environment, files):
    for number, file in enumerate(files, 1):
        written = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(written, number)
    begin(environment, folder)
    sys.path.insert(0, folder)
    exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})


class Kernel:
    """The process of a Jupyter kernel: all that jupyter_client asks of a Popen."""

    stdin = stdout = stderr = None

    def __init__(self, command, env=None, cwd=None, **_):
        arguments = command[command.index("-f") :]
        environment = dict(os.environ if env is None else env)
        self.process = start(_kernel, arguments, environment, str(cwd or Path.cwd()))
        self.pid = self.process.pid
        # Whoever ends a kernel ends its group, which must not be that of the tests.
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.01)

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _kernel(arguments, environment, folder):
    os.setsid()
    # As ipykernel sets it, where matplotlib is not imported yet.
    environment.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    begin(environment, folder)
    from ipykernel import kernelapp

    kernelapp.launch_new_instance(argv=arguments)
