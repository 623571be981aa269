"""Fine-tune a language model with the Trainer of transformers; a new attempt continues from the newest checkpoint."""

import os
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

TEXTS = [f"{a} + {b} = {a + b}" for a in range(40) for b in range(40)]  # your data: a list of texts
MODEL = None  # your model: a folder, or a name on the Hub


def load_model():
    """Return tokenizer and model: yours, or a tiny one that is made on the spot."""
    if MODEL:
        return AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    words.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return tokenizer, LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))


class Texts(Dataset):
    def __init__(self, tokenizer):
        self.tokens = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=16, return_tensors="pt")

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, index):
        item = {key: self.tokens[key][index] for key in ("input_ids", "attention_mask")}
        return item | {"labels": item["input_ids"].masked_fill(item["attention_mask"] == 0, -100)}


torch.manual_seed(0)
tokenizer, model = load_model()
arguments = TrainingArguments(
    output_dir="checkpoints", max_steps=200, save_steps=20, save_total_limit=3, logging_steps=20, report_to=[],
    per_device_train_batch_size=8, learning_rate=3e-3, disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(tokenizer))
newest = os.environ.get("CLUSTERCTL_RESUME_FROM")  # the file that the Trainer writes last in a checkpoint
if newest:
    print("resumes from", Path(newest).parent)
trainer.train(resume_from_checkpoint=str(Path(newest).parent) if newest else None)
trainer.save_model("model")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
