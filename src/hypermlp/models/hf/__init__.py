"""The language model as one of Hugging Face transformers: Auto classes, generate, Trainer, adapters, pipelines.

    import hypermlp.models.hf  # registers model_type "hypermlp"; the one line that transformers needs
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

A tool that cannot be given that line takes trust_remote_code=True instead: an exported folder has a modelling file that
imports this package, or says where to get it. Folders of models/saved.py are read too, and an exported folder by
models/saved.py. Needs `pip install 'hypermlp[hf]'`; without it this package imports, and its classes say so when they are used.
"""

from hypermlp.models.hf.adapters import lora_config
from hypermlp.models.hf.cache import HyperCache
from hypermlp.models.hf.config import HyperConfig
from hypermlp.models.hf.folder import export
from hypermlp.models.hf.heads import HyperForCausalLM, HyperForSequenceClassification, HyperForTokenClassification
from hypermlp.models.hf.library import register
from hypermlp.models.hf.model import HyperBlock, HyperModel, HyperPreTrainedModel
from hypermlp.models.hf.tokenizer import HyperTokenizer, fast_tokenizer

__all__ = [
    "HyperBlock",
    "HyperCache",
    "HyperConfig",
    "HyperForCausalLM",
    "HyperForSequenceClassification",
    "HyperForTokenClassification",
    "HyperModel",
    "HyperPreTrainedModel",
    "HyperTokenizer",
    "export",
    "fast_tokenizer",
    "lora_config",
]

register(
    HyperConfig,
    HyperTokenizer,
    AutoModel=HyperModel,
    AutoModelForCausalLM=HyperForCausalLM,
    AutoModelForSequenceClassification=HyperForSequenceClassification,
    AutoModelForTokenClassification=HyperForTokenClassification,
)
