"""Configurations and command lines of other programs, as their users have them."""

import json

ZERO_2_CPU = """
{
\t"fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
\t\t"initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
\t"bf16": {"enabled": "auto"},
\t"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
\t"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
\t"zero_optimization": {
\t\t"stage": 2,
\t\t"offload_optimizer": {"device": "cpu", "pin_memory": true},
\t\t"allgather_partitions": true,
\t\t"allgather_bucket_size": 2e8,
\t\t"overlap_comm": true,
\t\t"reduce_scatter": true,
\t\t"reduce_bucket_size": 2e6,
\t\t"contiguous_gradients": true
\t},
\t"gradient_accumulation_steps": "auto",
\t"gradient_clipping": "auto",
\t"train_batch_size": "auto",
\t"train_micro_batch_size_per_gpu": "auto"
}
"""

ZERO_3_NVME = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/DISK",
            "pin_memory": True,
            "buffer_count": 4,
            "fast_init": False,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/DISK",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 10000,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False},
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "wall_clock_breakdown": False,
}

ZERO_1 = {
    "train_micro_batch_size_per_gpu": 8,
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "zero_optimization": {"stage": 1},
}

ACCELERATE_DDP = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: 0,1
machine_rank: 0
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""

ACCELERATE_HOSTS = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 2222
mixed_precision: bf16
num_machines: 2
num_processes: 8
"""

ACCELERATE_ZERO_3 = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""

ACCELERATE_DEEPSPEED_FILE = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: zero_1.json
  zero3_init_flag: false
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
"""

ACCELERATE_FSDP_1 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""

ACCELERATE_FSDP_2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1000
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""

ACCELERATE_PARALLEL = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2}
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""

ACCELERATE_MEGATRON = """
compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""

ACCELERATE_CPU = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
mixed_precision: 'no'
mpirun_config: {mpirun_hostfile: hosts}
num_machines: 1
num_processes: 2
use_cpu: true
"""

FILES = {
    "zero_2_cpu.json": ZERO_2_CPU,
    "zero_3_nvme.json": json.dumps(ZERO_3_NVME, indent=2),
    "zero_1.json": json.dumps(ZERO_1),
    "ddp.yaml": ACCELERATE_DDP,
    "hosts.yaml": ACCELERATE_HOSTS,
    "zero_3.yaml": ACCELERATE_ZERO_3,
    "deepspeed_file.yaml": ACCELERATE_DEEPSPEED_FILE,
    "fsdp_1.yaml": ACCELERATE_FSDP_1,
    "fsdp_2.yaml": ACCELERATE_FSDP_2,
    "parallel.yaml": ACCELERATE_PARALLEL,
    "megatron.yaml": ACCELERATE_MEGATRON,
    "cpu.yaml": ACCELERATE_CPU,
}

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
