"""Scripts that do not close their LLM, by the ways in which they end, and their exit codes."""

from __future__ import annotations

from attrs import frozen

HEAD = """
import asyncio, atexit, os, signal, sys, threading, time
from headstock import LLM, SamplingParams as P
p = P(max_tokens=300, ignore_eos=True)
def make():
    return LLM("demo", num_pages=512)
"""


@frozen
class Way:
    """A way out of a script: what it does, the code it ends with, what it prints."""

    code: str
    exit_code: int = 0
    output: str = ""


WAYS = {
    "a stream is left open": Way("llm = make(); s = llm.stream('Once', p); next(iter(s))"),
    "a script exits within a stream": Way(
        """
llm = make()
for piece in llm.stream("Once", p):
    raise SystemExit(3)
""",
        3,
    ),
    "an exception leaves several engines": Way(
        """
llms = [make(), make()]
streams = [llm.stream("Once", p) for llm in llms]
for stream in streams:
    next(stream)
raise ValueError
""",
        1,
    ),
    "daemon threads stream on": Way(
        """
llm, begun = make(), threading.Semaphore(0)
def work():
    while True:
        for piece in llm.stream("Once", p):
            begun.release()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
for _ in range(9):
    begun.acquire()
sys.exit(4)
""",
        4,
    ),
    "daemon threads take errors for nothing": Way(
        """
llm, begun = make(), threading.Semaphore(0)
def work():
    while True:
        try:
            llm.generate(["Once " * 50] * 3, P(max_tokens=2))
            begun.release()
        except Exception:
            pass
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
begun.acquire()
sys.exit(4)
""",
        4,
    ),
    "threads stream to their ends": Way(
        """
llm = make()
begun = threading.Event()
def work():
    text = ""
    for piece in llm.stream("Once", p):
        begun.set()
        text += piece.outputs[0].text
    assert piece.outputs[0].finish_reason == "length", piece.outputs[0].finish_reason
    print("whole")
threading.Thread(target=work).start()
begun.wait()
sys.exit(5)
""",
        5,
        "whole\n",
    ),
    "a thread exits": Way(
        """
llm = make()
def work():
    for piece in llm.stream("Once", p):
        sys.exit(7)
thread = threading.Thread(target=work)
thread.start()
thread.join()
sys.exit(2)
""",
        2,
    ),
    "a pool works on": Way(
        """
from concurrent.futures import ThreadPoolExecutor
llm = make()
pool = ThreadPoolExecutor(2)
def work():
    print(len(llm.generate("Once", p)[0].outputs[0].token_ids))
for _ in range(3):
    pool.submit(work)
raise SystemExit(6)
""",
        6,
        "300\n" * 3,
    ),
    "an engine is made once the main thread has ended": Way(
        """
import torch  # whose import needs the main thread
def work():
    threading.main_thread().join()
    llm = make()
    print(len(llm.generate("Once", p)[0].outputs[0].token_ids))
threading.Thread(target=work).start()
sys.exit(6)
""",
        6,
        "300\n",
    ),
    "a daemon thread loads a model": Way(
        """
began = threading.Event()
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "headstock.engine.loop":
            began.set()
sys.meta_path.insert(0, Watch())
threading.Thread(target=make, daemon=True).start()
began.wait()
sys.exit(3)
""",
        3,
    ),
    "daemon threads load models again and again": Way(
        """
def work():
    while True:
        try:
            llm = make()
            begun.set()
        except Exception:
            pass
begun = threading.Event()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
sys.exit(3)
""",
        3,
    ),
    "tasks are pending": Way(
        """
llm = make()
async def stream():
    async for piece in llm.astream("Once", p):
        begun.set()
async def main():
    global begun, tasks
    begun = asyncio.Event()
    tasks = [asyncio.create_task(stream()) for _ in range(3)]
    await begun.wait()
    sys.exit(8)
asyncio.run(main())
""",
        8,
    ),
    "an event loop is left with its tasks": Way(
        """
llm = make()
loop = asyncio.new_event_loop()
async def stream():
    async for piece in llm.astream("Once", p):
        begun.set()
async def main():
    global begun, tasks
    begun = asyncio.Event()
    tasks = [asyncio.create_task(stream()) for _ in range(3)]
    await begun.wait()
loop.run_until_complete(main())
"""
    ),
    "an async generator is left open": Way(
        """
llm = make()
async def main():
    global stream
    stream = llm.astream("Once", p)
    async for piece in stream:
        break
asyncio.run(main())
sys.exit(9)
""",
        9,
    ),
    "a thread's event loop runs for ever": Way(
        """
llm = make()
begun = threading.Event()
async def stream():
    while True:
        async for piece in llm.astream("Once", p):
            begun.set()
threading.Thread(target=asyncio.run, args=[stream()], daemon=True).start()
begun.wait()
sys.exit(2)
""",
        2,
    ),
    "an atexit handler exits": Way(
        """
llm = make()
stream = llm.stream("Once", p)
next(stream)
def leave():
    next(stream)
    print("streams")
    sys.exit(3)
atexit.register(leave)
""",
        0,
        "streams\n",
    ),
    "an atexit handler older than the engine uses it": Way(
        """
@atexit.register
def use():
    print(len(llm.generate("Once", p)[0].outputs[0].token_ids))
llm = make()
next(llm.stream("Once", p))
""",
        0,
        "300\n",
    ),
    "an atexit handler makes an engine": Way(
        """
import torch  # whose import an atexit handler cannot do
@atexit.register
def use():
    global llm, stream
    llm = make()
    stream = llm.stream("Once", p)
    next(stream)
    print("streams")
""",
        0,
        "streams\n",
    ),
    "an engine in a cycle and in a module": Way(
        """
import types
module = types.ModuleType("kept")
sys.modules["kept"] = module
module.llm = make()
class Owner:
    def __init__(self):
        self.me, self.llm = self, make()
        self.stream = self.llm.stream("Once", p)
        next(self.stream)
owner = Owner()
stream = module.llm.stream("Once", p)
next(stream)
del owner, stream
"""
    ),
    "an engine is dropped within its stream": Way(
        """
llm = make()
stream = llm.stream("Once", p)
next(stream)
del llm, stream
sys.exit(3)
""",
        3,
    ),
    "a daemon thread closes an engine": Way(
        """
llm = make()
began = threading.Event()
def work():
    llm.stream("Once " * 400, p)
    begin = llm._session.engine.recorder.close
    llm._session.engine.recorder.close = lambda: (began.set(), begin())
    llm.close()
threading.Thread(target=work, daemon=True).start()
began.wait()
sys.exit(3)
""",
        3,
    ),
    "a long prompt is computed": Way(
        """
llm = make()
stream = llm.stream({"prompt_token_ids": [5] * 1500}, p)
done = threading.Event()
threading.Thread(target=next, args=[stream], daemon=True).start()
time.sleep(0.05)
sys.exit(3)
""",
        3,
    ),
    "Ctrl-C": Way(
        """
llm = make()
for piece in llm.stream("Once", p):
    raise KeyboardInterrupt
""",
        -2,
    ),
    "Ctrl-C while a closing engine is waited for": Way(
        """
llm = make()
next(llm.stream("Once", p))
stream = llm.stream("Once", p)
next(stream)
close = llm._session.loop.close
def interrupted():
    llm._session.loop.close = close
    raise KeyboardInterrupt
llm._session.loop.close = interrupted
sys.exit(3)
""",
        3,
    ),
    "a test of unittest fails": Way(
        """
import unittest
class Test(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.llm = make()
    def test(self):
        self.stream = self.llm.stream("Once", p)
        next(self.stream)
        self.fail()
unittest.main(argv=["x"])
""",
        1,
    ),
    "a spawned process": Way(
        """
import multiprocessing
def work():
    global llm, stream
    llm = make()
    stream = llm.stream("Once", p)
    next(stream)
    sys.exit(5)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    sys.exit(process.exitcode)
""",
        5,
    ),
    "a console's line by line": Way(
        """
import code
console = code.InteractiveConsole(globals())
for line in ("llm = make()", "s = llm.stream('Once', p)", "x = next(s)", "raise SystemExit(4)"):
    console.push(line)
""",
        4,
    ),
}
"""What is left when the script ends -> the script."""
