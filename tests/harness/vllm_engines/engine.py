"""The handle of one engine's process, for a test's thread."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

__all__ = (
    "ENVIRONMENT",
    "VOCABULARY",
    "Answer",
    "Engine",
    "StartEngine",
    "make_tiny_model",
    "random_prompt",
)

VOCABULARY: Final = 512


def make_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write config and weights to ``folder``, of each seed always the same.

    The weights are large enough that greedy tokens depend on the whole prompt.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def random_prompt(length: int, *, seed: int) -> list[int]:
    """Return token ids that no other seed gives."""
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]


_READY_S: Final = 120.0
_ANSWER_S: Final = 60.0
ENVIRONMENT: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Else every process compiles torch and vLLM anew, where the variable is set.
    "PYTHONDONTWRITEBYTECODE": "",
}
"""What vLLM is told: one thread, no network, and the engine in the same process."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came out of one request."""

    tokens: tuple[int, ...] = ()
    finish_reason: str = ""
    cached_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None


class Engine:
    """One vLLM engine with ``options`` of ``LLM`` beside those that all tests have.

    ``transfer`` is its ``kv_transfer_config``. What it logs goes to ``log``. Several
    threads may ask at once, but only one for its ``state``.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        arguments = {
            "model": str(model),
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "block_size": 32,
            "num_gpu_blocks_override": 256,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "seed": 0,
            **options,
        }
        if transfer is not None:
            arguments["kv_transfer_config"] = dict(transfer)
        self.log = log
        self._writing = threading.Lock()
        self._numbers = itertools.count(1)
        self._answers: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "harness.vllm_engines",
                    json.dumps(arguments),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **ENVIRONMENT},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> Self:
        """Wait until it takes requests."""
        self._next(self._told, _READY_S)
        return self

    def add(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 8,
        params: Mapping[str, Any] | None = None,
        samples: int = 1,
    ) -> str:
        """Start a request and return its id; of several samples all are the best."""
        request_id = f"r{next(self._numbers)}"
        self._answers[request_id] = queue.SimpleQueue()
        self._order(
            do="add",
            id=request_id,
            tokens=list(tokens),
            max_tokens=max_tokens,
            params=None if params is None else dict(params),
            samples=samples,
        )
        return request_id

    def answer(self, request_id: str, timeout_s: float = _ANSWER_S) -> Answer:
        """Wait for a request's end."""
        found = self._next(self._answers[request_id], timeout_s)
        del self._answers[request_id]
        return Answer(
            tuple(found.get("tokens", ())),
            found["finish_reason"],
            found.get("cached_tokens", 0),
            found.get("kv_transfer_params"),
        )

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        """Add a request and wait for its end."""
        return self.answer(self.add(tokens, **options))

    def abort(self, request_id: str) -> Answer:
        """Abort a request."""
        self._order(do="abort", id=request_id)
        return self.answer(request_id)

    def state(self) -> dict[str, Any]:
        """Return ``free_blocks``, ``requests``, ``staged_saves`` and ``metrics``."""
        self._order(do="state")
        return self._next(self._told, _ANSWER_S)

    def tell(self, what: Literal["time", "watch_blocks", "lie"]) -> None:
        """Tell it to note something from now on; or its worker, to lie.

        ``time`` is what ``times`` reports, ``watch_blocks`` what ``blocks`` does. The
        lie is that everybody's moves have ended, and those of others.
        """
        self._order(do=what)

    def report(self, what: Literal["times", "blocks"]) -> dict[str, Any]:
        """Return what a :class:`StepTimes`, or a :class:`BlockWitness`, reports."""
        self._order(do=what)
        return self._next(self._told, _ANSWER_S)

    def external_hits(self) -> int:
        """Return how many tokens it was given by another engine so far."""
        return int(self.state()["metrics"]["vllm:external_prefix_cache_hits"])

    def why_not_loaded(self) -> str:
        """Return what it logged of loads that failed."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "did not come" in line)

    def pause(self) -> None:
        """Let it do nothing at all, not even answer its peers."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After :meth:`pause`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let it shut down as vLLM does, in 30 s at most."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is not None:
            # What it was told when it was dead already is still in there.
            with contextlib.suppress(BrokenPipeError):
                stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(5)
        if stdout is not None:
            stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _order(self, **order: Any) -> None:
        if self._process.stdin is None:
            raise RuntimeError("the engine has no stdin")
        try:
            with self._writing:
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._death()) from None

    def _next(
        self, answers: queue.SimpleQueue[dict[str, Any]], timeout_s: float
    ) -> dict[str, Any]:
        try:
            found = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(
                f"no answer in {timeout_s:g} s: {self._tail()}"
            ) from None
        if not found:
            raise RuntimeError(self._death())
        return found

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        return f"the engine ended with {self._process.poll()}: {self._tail()}"

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def _read(self) -> None:
        for line in self._process.stdout or ():
            told = json.loads(line)
            # Of a request that was aborted as it ended nobody waits any more.
            waiting = self._answers.get(told["id"]) if "id" in told else self._told
            if waiting is not None:
                waiting.put(told)
        for waiting in (self._told, *list(self._answers.values())):
            waiting.put({})


StartEngine: TypeAlias = Callable[..., AbstractContextManager[Engine]]
"""Starts one with a ``kv_transfer_config``, or none, and options of ``LLM``.

It does not wait until it is ready. Leaving ends it.
"""
