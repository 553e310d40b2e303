"""The built-in policy, for a laptop and for tests: a word-level tokenizer over a task's own words, a small Qwen3.

Nothing is downloaded, and everything else treats it as any other causal language model.
"""

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, END = "<|pad|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a word, split at white space and punctuation; a word outside `words` is an error."""
    marks = pre_tokenizers.Split(Regex(r"""[\[\](){}.,:;!?'"]"""), "isolated")
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    pieces = [piece for piece, _ in split.pre_tokenize_str(" ".join(words))]
    vocabulary = dict.fromkeys([PAD, END, "<|system|>", "<|user|>", "<|assistant|>", *pieces])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = split
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(vocabulary: int, hidden: int, layers: int, eos: int, pad: int) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 with `hidden` channels, a head of 32 for every 16 of them, tied embeddings."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 16,
        head_dim=32,  # vLLM knows no smaller head
        # prompts are short: with the usual base most channels of so small a head would know no position
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)
