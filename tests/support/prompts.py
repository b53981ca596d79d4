"""Twenty prompts of different lengths and kinds, the same for every exactness test."""

_STORY = (
    "The harbour woke before the town did. Nets were hung, ropes were coiled, and the first boats slid out past "
    "the lighthouse while the windows on the hill were still dark. "
)

PROMPTS = (
    "Hello",
    "1, 2, 3, 4,",
    "The capital of France is",
    "Water boils at",
    "Once upon a time there was a fisherman who",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    'SELECT name, COUNT(*) FROM orders WHERE status = "open"',
    "<html>\n<head><title>",
    "你好，请介绍一下北京。",
    "今天天气很好，我们去公园",
    "Grüße aus München! Heute ist ein",
    "Ceci n'est pas une",
    "😀 😃 😄",
    "   leading spaces and\ttabs\n\n\nand newlines",
    "Q: What is 17 + 25?\nA:",
    "List three fruits:\n1.",
    _STORY * 3 + "That morning, the oldest of the boats",
    _STORY * 8 + "In short:",
    _STORY * 20 + "The moral of the story is that",
)
"""The last one has about 800 tokens: several prefill chunks when a step holds 256."""

PREFILL_BUDGET = ("--set", "scheduler.max_num_seqs=64", "--set", "scheduler.max_num_batched_tokens=256")
"""Settings under which the longest prompt needs several chunks."""
