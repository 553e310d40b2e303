#!/usr/bin/env bash
# Does training run on this GPU at the size of a real model, how fast, in how much memory? See gpu_smoke.py.
#
#   bash benchmarks/gpu_smoke.sh            one GPU, at most ten minutes, no network
#   bash benchmarks/gpu_smoke.sh --tiny     the same stages on a CPU, small: the logic alone
#
# Results go to $OUT (default ./gpu_smoke) as they come; models and run folders, tens of GB, to $WORK, which is removed.
# $PYTHON is the interpreter. Exit code 0 if every stage that could run did.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu_smoke}
PYTHON=${PYTHON:-python}
PRECISION="--mixed_precision bf16" # float32 parameters, bfloat16 compute; the one place that says so
mkdir -p "$OUT"
WORK=${WORK:-$(mktemp -d)}
trap 'rm -rf "$WORK"' EXIT
rm -f "$OUT/results.jsonl" "$OUT/report.md" "$OUT/stages.txt"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
LAUNCH="$PYTHON -m accelerate.commands.launch --num_processes 1 --num_machines 1 --dynamo_backend no"
TINY=${1:-}
if [ "$TINY" = --tiny ]; then
    export OMP_NUM_THREADS=1
    SIZE="--groups_per_step 4 --eval_levels 8 --max_response_tokens 32 --tokens_per_micro_batch 4096 --mini_batch 32"
    CACHE="--kv_cache_gib 0.1" LESS="--steps 2"
else
    SIZE="--groups_per_step 8 --eval_levels 16 --max_response_tokens 128 --tokens_per_micro_batch 16384 --mini_batch 64"
    CACHE="--kv_cache_gib 20" LESS="--steps 2 --max_turns 3 --max_tries 2 --max_response_tokens 64"
fi
TASK="--env benchmarks/gpu_smoke.py:Walk --recipe tiny --prompt_style words --history 2 --max_prompt_tokens 1024"
TASK="$TASK --min_solution 1 --max_solution 3 --max_walls 4 --max_turns 4 --max_minutes 0 --learning_rate 1e-6"
FLAGS="--sft_steps 0 --steps 3 --eval_every 3 $TASK $SIZE --output $WORK/runs --overwrite"
FAILED=0

stage() { # stage NAME SECONDS COMMAND...
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1
    code=$?
    [ $code -eq 0 ] || FAILED=1
    echo "$name: exit code $code after $((SECONDS - began)) s, limit $limit s" | tee -a "$OUT/stages.txt"
    [ $code -eq 0 ] || grep -v "^ \|^subprocess.CalledProcessError" "$OUT/$name.log" | tail -n 4
}

SMOKE=benchmarks/gpu_smoke.py
RUN="--out $OUT -- $FLAGS"
stage make 50 $PYTHON $SMOKE make "$WORK/model" --out "$OUT" $TINY
stage update 85 $LAUNCH $PRECISION $SMOKE update "$WORK/model" --out "$OUT" $TINY
if $PYTHON -c "import importlib.util as i, sys; sys.exit(i.find_spec('vllm') is None)"; then
    stage vllm 195 $LAUNCH $PRECISION $SMOKE train "$WORK/model" $RUN --name vllm --engine vllm $CACHE
    rm -rf "$WORK/runs"
fi
# decoding without vLLM takes as long for a short batch as for a long one: fewer and shorter turns
stage transformers 145 $LAUNCH $PRECISION $SMOKE train "$WORK/model" $RUN --name transformers --engine transformers $LESS
rm -rf "$WORK/runs"
if $PYTHON -c "import torch, sys; sys.exit(not torch.cuda.is_available())"; then # accelerate has no FSDP on a CPU
    FSDP="$PYTHON -m accelerate.commands.launch --config_file fsdp.yaml --num_processes 1"
    stage fsdp 85 $FSDP $SMOKE update "$WORK/model" --out "$OUT" $TINY
fi
cat "$OUT/stages.txt" "$OUT/report.md"
exit $FAILED
