# %% [markdown]
# # Tokens in, tokens out, under a deadline
#
# A sensor, a caller or a game hands over a token every few milliseconds and wants the model's answer before the next one. The
# model reads each token once, in constant time and memory (past its length it slides), so nothing builds up as the stream goes
# on. A late answer must not make all later ones late: the queue between both sides is bounded, and what comes while it is full
# is dropped and counted, not stored.

# %%
import queue
import threading
import time
from dataclasses import dataclass, field

import torch

from hypermlp import LanguageModel, ModelConfig, quantize


@dataclass
class Service:
    """Reads tokens from a bounded queue in a thread of its own, and answers each with the likeliest next one."""

    model: LanguageModel
    deadline: float  # seconds from a token's arrival to its answer
    waiting: int = 4  # tokens that may wait
    answers: list[int] = field(default_factory=list)
    late: int = 0  # answered after the deadline
    dropped: int = 0  # refused, because too many waited
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self.tokens: queue.Queue[tuple[int, float] | None] = queue.Queue(self.waiting)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def send(self, token: int) -> bool:
        """Hand over a token; False, at once, where the service is behind."""
        try:
            self.tokens.put_nowait((token, time.perf_counter()))
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def stop(self) -> None:
        """Answer what waits, and end."""
        self.tokens.put(None)
        self.thread.join()

    def _run(self) -> None:
        # max_len: memory for a whole window from the start, so that no token has to wait for more.
        cache = self.model.new_cache(1, max_len=self.model.config.length)
        token = torch.zeros(1, 1, dtype=torch.int64)
        with torch.inference_mode():
            while (given := self.tokens.get()) is not None:
                token[0, 0], arrived = given
                self.answers.append(int(self.model(token, cache=cache).argmax()))
                took = time.perf_counter() - arrived
                self.slowest = max(self.slowest, took)
                self.late += took > self.deadline


# %% [markdown]
# The first call of a process compiles the kernel and lays out the model's parameters. A service does that before it opens.


# %%
def warm_up(model: LanguageModel) -> None:
    cache = model.new_cache(1)
    with torch.inference_mode():
        for _ in range(3):
            model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
        print(model.explain(torch.zeros(1, 1, dtype=torch.int64), cache))


torch.manual_seed(0)
torch.set_num_threads(1)  # a small model is done before a second thread has begun
model = quantize(LanguageModel(ModelConfig(vocabulary=257, width=64, depth=2, length=128)).eval())
warm_up(model)

# %% [markdown]
# A token every five milliseconds, and twice as many as the window is long.

# %%
service = Service(model, deadline=0.005)
service.start()
for n in range(256):
    service.send(n % 257)
    time.sleep(0.005)
service.stop()
print(f"answered {len(service.answers)}, late {service.late}, dropped {service.dropped}")
print(f"slowest answer after {1e3 * service.slowest:.2f} ms")

# %% [markdown]
# A burst that comes faster than anybody can answer: what does not fit is refused, and what is answered is the right answer.

# %%
service = Service(model, deadline=0.005)
sent = [n % 257 for n in range(2000) if service.send(n % 257)]  # nobody reads yet
service.start()
service.stop()
print(f"a burst of 2000: answered {len(service.answers)}, dropped {service.dropped}")
with torch.no_grad():
    assert service.answers == model(torch.tensor([sent])).argmax(-1)[0].tolist()
