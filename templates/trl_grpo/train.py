"""Train a model by rewards (GRPO) with TRL; every rank generates and trains. A new attempt continues."""

import os
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

MODEL = None  # your model: a folder, or a name on the Hub
PROMPTS = [{"prompt": f"{a} + {b} ="} for a in range(40) for b in range(40)]  # your data


def count_digits(completions, **_):
    """Return the reward of each completion: the part of it that is digits. Write yours here."""
    return [sum(sign.isdigit() for sign in text) / (len(text) or 1) for text in completions]


def load_model():
    """Return tokenizer and model: yours, or a tiny one that is made on the spot."""
    if MODEL:
        return AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    texts = [row["prompt"] for row in PROMPTS]
    words.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>", "<pad>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return tokenizer, LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size, **ends))


torch.manual_seed(0)
tokenizer, model = load_model()
arguments = GRPOConfig(
    output_dir="checkpoints", max_steps=40, save_steps=4, save_total_limit=3, logging_steps=4, report_to=[],
    per_device_train_batch_size=4, num_generations=4, max_completion_length=8, learning_rate=3e-3, disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(), gradient_checkpointing=False,
)  # fmt: skip
trainer = GRPOTrainer(
    model, count_digits, args=arguments, train_dataset=Dataset.from_list(PROMPTS), processing_class=tokenizer
)
newest = os.environ.get("CLUSTERCTL_RESUME_FROM")  # the file that the Trainer writes last in a checkpoint
if newest:
    print("resumes from", Path(newest).parent)
trainer.train(resume_from_checkpoint=str(Path(newest).parent) if newest else None)
trainer.save_model("model")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
