"""Folders that any tool of the Hugging Face ecosystem loads.

config.json              the model's configuration; auto_map names the classes of the modelling file
model.safetensors        the weights (or several files and an index)
modeling_hypermlp.py     imports this package or says where to get it, run only with trust_remote_code=True
generation_config.json   where generation stops
tokenizer.json, tokenizer_config.json
README.md                the model card
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypermlp import __version__
from hypermlp.models.hf.library import CURE, transformers
from hypermlp.models.hf.tokenizer import fast_tokenizer

if TYPE_CHECKING:
    from hypermlp.models.lm import LanguageModel

MODULE = "modeling_hypermlp"
CLASSES = {
    "AutoConfig": "HyperConfig",
    "AutoModel": "HyperModel",
    "AutoModelForCausalLM": "HyperForCausalLM",
    "AutoModelForSequenceClassification": "HyperForSequenceClassification",
    "AutoModelForTokenClassification": "HyperForTokenClassification",
}
# For models that were not trained on conversations: who speaks, and what is said, a line each.
# What the assistant says stands between generation marks, so that TRL can train on it alone (assistant_only_loss).
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ '\\n' }}{% endgeneration %}"
    "{% else %}{{ message.content }}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
AUTO_MAP = {auto: f"{MODULE}.{name}" for auto, name in CLASSES.items()}


MODELLING_FILE = f"""try:
    from hypermlp.models.hf import {", ".join(CLASSES.values())}
except ImportError as error:
    raise ImportError(
        "this model was saved by hypermlp {__version__} and needs that package: pip install 'hypermlp[hf]', "
        "or pip install '.[hf]' in a checkout of its source"
    ) from error
"""


def write_modelling_file(folder: Path) -> None:
    (folder / f"{MODULE}.py").write_text(MODELLING_FILE, encoding="utf-8")


def export(net: LanguageModel, folder: Path, tokenizer: dict[str, Any] | None = None, card: str | None = None) -> None:
    """Save for Hugging Face; the native loader reads the folder too.

    tokenizer: as saved beside the model, with which generation stops at the end of a document. card: the text of README.md.
    """
    if transformers is None:
        raise ImportError(CURE)
    from hypermlp.models.hf.heads import HyperForCausalLM

    model = HyperForCausalLM.wrap(net)
    if tokenizer is not None:
        fast = fast_tokenizer(tokenizer)
        fast.model_max_length, fast.chat_template = net.config.length, CHAT_TEMPLATE
        end = fast.eos_token_id
        tokens = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        model.config.update(tokens)
        model.generation_config = transformers.GenerationConfig(**tokens)
        fast.save_pretrained(folder)
    model.save_pretrained(folder)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")
