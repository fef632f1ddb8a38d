#!/usr/bin/env bash
# What smoke/results/h200/vllm is made of, into a folder: smoke/vllm/run.sh FOLDER PART TRACE...
# PART: numbers, compiled, compiled-fp8, tp2 (on two GPUs), applied, times, times-again (FLASH_ATTN twice in the place of
# FLASHINFER), times-compiled (as times-again, by torch.compile), times-fp8, or all of them but tp2. Needs vLLM 0.26.0 with
# our package installed, and an idle GPU of SM90. A plugin's first run tunes, on a GPU that nothing else uses; what only
# reads its plan, or needs none, runs side by side.
set -uo pipefail
out=$1 part=$2
shift 2
mkdir -p "$out"
export DYN_DECODE_CACHE_DIR=${DYN_DECODE_CACHE_DIR:-$(mktemp -d)} OMP_NUM_THREADS=2
traces=()
for trace in "$@"; do traces+=(--trace "$trace"); done

numbers() { # suffix, backends beside the plugin, options
  local suffix=$1 others=$2
  shift 2
  # a plugin's first run tunes on an idle GPU, "forced" does not tune
  python3 -m smoke.vllm.numbers --backend plugin --out "$out/plugin$suffix.json" "$@" &> "$out/plugin$suffix.log"
  for backend in $others; do
    python3 -m smoke.vllm.numbers --backend "$backend" --out "$out/$backend$suffix.json" "$@" &> "$out/$backend$suffix.log" &
  done
  wait
  mkdir -p "$out/of$suffix"
  for backend in plugin $others; do mv "$out/$backend$suffix.json" "$out/of$suffix/$backend.json"; done
  python3 -m smoke.vllm.numbers --compare "$out/of$suffix"/*.json --out "$out/numbers$suffix.json"
}

case $part in numbers | all)
  numbers "" "FLASH_ATTN forced off absent"
  numbers -fp8 "FLASH_ATTN forced off absent" --fp8
  ;;
esac
case $part in compiled | all) numbers -compiled "FLASH_ATTN forced" --compiled ;; esac
case $part in compiled-fp8 | all) numbers -compiled-fp8 "FLASH_ATTN forced" --compiled --fp8 ;; esac
case $part in tp2) numbers -tp2 "FLASH_ATTN forced off" --tp 2 ;; esac
case $part in applied | all)
  for backend in plugin forced off FLASH_ATTN; do
    python3 -m smoke.vllm.applied --backend "$backend" --out "$out/applied-$backend.json" &> "$out/applied-$backend.log" &
  done
  wait
  ;;
esac
times() { # name, options
  python3 -m smoke.vllm.times "${traces[@]}" --out "$out/$1.json" "${@:2}" 2> "$out/$1.log"
}

case $part in times | all) times times --kv-gib 27.2 --without "FLASH_ATTN again" ;; esac
case $part in times-again | all) times times-again --kv-gib 27.2 --without FLASHINFER ;; esac
case $part in times-compiled | all) times times-compiled --kv-gib 27.2 --without FLASHINFER --compiled ;; esac
case $part in times-fp8 | all) times times-fp8 --fp8 ;; esac
