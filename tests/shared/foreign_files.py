"""Configurations and command lines of other programs, as their users have them."""

from pathlib import Path

FILES = {
    path.name: path.read_text() for path in sorted(Path(__file__).with_name("foreign").iterdir())
}
"""The texts of files by their names."""

LINES = {
    "torchrun": "torchrun --standalone --nproc_per_node=2 train.py --lr 1e-4",
    "torchrun of hosts": "python3 -m torch.distributed.run --nnodes 2 --nproc-per-node=gpu "
    "--node_rank $SLURM_NODEID --rdzv_backend c10d --rdzv_endpoint 10.0.0.1:29400 train.py",
    "accelerate": "accelerate launch --config_file zero_3.yaml --num_processes 4 "
    "--mixed_precision fp16 train.py --epochs 3",
    "accelerate with flags": "accelerate launch --use_fsdp --fsdp_version 2 "
    "--fsdp_offload_params true --num_processes 2 -m package.train",
    "deepspeed": "deepspeed --num_gpus 2 --master_port 29501 train.py --deepspeed zero_1.json x",
    "torchrun of a Trainer": "OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 train.py "
    "--deepspeed=zero_3_nvme.json",
}

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
"""The config.json of a small model of transformers."""
