"""What a program has of signals is as it would be without the shim, and those that it handles are written down."""

from __future__ import annotations

import os
import signal

import pytest

HANDLERS = """
import asyncio, faulthandler, os, signal, sys, threading, traceback

def frames(): return [frame.name for frame in traceback.extract_stack()]
class Handler:
    def __call__(self, number, frame): print('called', number, type(frame).__name__, frames())
    def method(self, number, frame): print('method', number)
def plain(number, frame): print('plain', number, type(number).__name__, frames())
def raises(number, frame): raise ValueError('from a handler')

print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(2), signal.getsignal(15))
for handler in (Handler(), Handler().method, plain, lambda number, frame: print('lambda')):
    before = signal.getsignal(15)
    assert signal.signal(signal.SIGTERM, handler) is before
    assert signal.getsignal(15) is handler or signal.getsignal(15) == handler
    os.kill(os.getpid(), 15)
assert signal.signal(15, signal.SIG_IGN).__name__ == '<lambda>'
os.kill(os.getpid(), 15)
print(signal.signal(15, signal.SIG_DFL), signal.getsignal(signal.SIGTERM))
for number, handler in ((15, 'text'), ('x', plain), (9, plain), (None, None)):
    try: signal.signal(number, handler)
    except Exception as error: print(type(error).__name__, error)
thread = threading.Thread(target=lambda: print(_try()))
def _try():
    try: signal.signal(15, plain)
    except ValueError as error: return str(error)
thread.start(); thread.join()
signal.signal(15, raises)
try: os.kill(os.getpid(), 15)
except ValueError as error: print([frame.name for frame in traceback.extract_tb(error.__traceback__)])
try: os.kill(os.getpid(), 2); signal.pause()
except KeyboardInterrupt as error: print([frame.name for frame in traceback.extract_tb(error.__traceback__)])
async def main():
    got, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, got.set)
    loop.add_signal_handler(signal.SIGINT, got.set)
    os.kill(os.getpid(), 15)
    await got.wait()
    print('asyncio', loop.remove_signal_handler(signal.SIGTERM), signal.getsignal(15))
asyncio.run(main())
faulthandler.register(signal.SIGUSR1, chain=False)
faulthandler.register(signal.SIGTERM, chain=True); faulthandler.unregister(signal.SIGTERM)
signal.signal(15, plain)
pid = os.fork()
if not pid: os.kill(os.getpid(), 15); os._exit(0)
os.waitpid(pid, 0)
print(signal.signal.__name__, signal.signal.__module__, signal.signal.__doc__, signal.getsignal.__doc__)
"""


def test_a_program_sees_its_handlers_as_without_the_shim(bench, python):
    texts = []
    for injected in (True, False):
        worker = bench.start(HANDLERS, python=python, injected=injected, options=("-W", "ignore"))
        assert worker.wait() == 0, worker.text
        texts.append(worker.text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param("import signal; signal.signal({number}, on)", id="module"),
        pytest.param("from signal import signal; signal({number}, on)", id="name"),
        pytest.param(
            "import asyncio\nasync def main():\n global got\n got = asyncio.Event()\n"
            " asyncio.get_running_loop().add_signal_handler({number}, got.set)\n print('up')\n await got.wait()\n"
            "asyncio.run(main()); sys.exit(0)",
            id="asyncio",
        ),
    ],
)
def test_a_signal_that_a_handler_has_taken_is_written_down(bench, python, number, setting):
    worker = bench.start(
        "import sys, time\ngot = []\ndef on(*_): got.append(1)\n"
        + setting.format(number=int(number))
        + "\nprint('up')\nwhile not got: time.sleep(0.01)\n",
        python=python,
    )
    worker.prints("up")
    assert worker.said("signal") is None
    os.kill(worker.pid, number)
    assert worker.wait() == 0, worker.text
    told = worker.said("signal")
    assert (told["pid"], told["start_time"], told["signal"]) == (worker.pid, worker.start_time, number)


def test_a_keyboard_interrupt_that_is_caught_is_written_down_and_other_signals_are_not(bench, python):
    worker = bench.start(
        "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: print('usr1'))\n"
        "try:\n print('up')\n while True: time.sleep(0.01)\nexcept KeyboardInterrupt: pass\n",
        python=python,
    )
    worker.prints("up")
    os.kill(worker.pid, signal.SIGUSR1)
    worker.prints("usr1")
    assert worker.said("signal") is None
    os.kill(worker.pid, signal.SIGINT)
    assert worker.wait() == 0, worker.text
    assert worker.said("signal")["signal"] == signal.SIGINT
