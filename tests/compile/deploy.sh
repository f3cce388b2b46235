#!/bin/sh
# The files of examples/deploy: mpirun.sh trains on this machine. The commands of the others are run by
# stand-ins that record their arguments.
#   sh deploy.sh ROOT WORK
set -eu
root=$1 work=$2
fail() { echo "deploy: $*" >&2; exit 1; }
rm -rf "$work"
mkdir -p "$work/bin" "$work/examples"
cp "$root/ddp.h" "$root/ddp_fsdp.h" "$root/ddp_cuda.cuh" "$work"
cp -r "$root/examples/." "$work/examples"
cd "$work"

stand_in() { # name, body: it comes before the real one
    printf '#!/bin/sh\n%s\n' "$2" >"bin/$1"
    chmod +x "bin/$1"
}
real=$(command -v mpicc || true)
stand_in mpicc 'while [ "$1" != -o ]; do shift; done; : >"$2"; chmod +x "$2"'
if [ -n "$real" ] && command -v mpirun >/dev/null; then stand_in mpicc "exec $real \"\$@\" -O0"; fi
stand_in nvcc 'while [ "$1" != -o ]; do shift; done; : >"$2"; chmod +x "$2"'
stand_in nvidia-smi 'printf "GPU 0\nGPU 1\nGPU 2\n"'
for launcher in torchrun srun; do stand_in $launcher "echo $launcher \"\$@\"; echo order=\$NCCL_LAUNCH_ORDER_IMPLICIT"; done
PATH=$work/bin:$PATH
export PATH

# --- Open MPI ---

if [ -n "$real" ] && command -v mpirun >/dev/null; then
    echo 'localhost slots=2' >here
    sh examples/deploy/mpirun.sh here --steps 2 --layers 1 --heads 1 --channels 16 --context 16 --batch 8 examples >log 2>&1 || fail "mpirun.sh: $(cat log)"
    grep -q '2 ranks' log || fail "mpirun.sh does not run two ranks: $(cat log)"
else
    echo "mpicc or mpirun is missing: mpirun.sh was not run"
fi
[ "$(grep -c '^node[0-9]* slots=8$' examples/deploy/hostfile)" = 2 ] || fail "the hostfile has no two machines of 8 ranks"

# --- torchrun, SLURM ---

if sh examples/deploy/torchrun.sh >log 2>&1 || ! grep -q 'NODES=2 HEAD=node1' log; then fail "torchrun.sh does not say what it needs: $(cat log)"; fi
NODES=2 HEAD=node1 sh examples/deploy/torchrun.sh >log 2>&1 || fail "torchrun.sh: $(cat log)"
grep -q '^torchrun --no-python --nnodes 2 --nproc_per_node 3 .* node1:29400 .* \./all_reduce_cuda$' log || fail "torchrun.sh starts $(cat log)"
grep -q '^order=1$' log || fail "torchrun.sh does not set NCCL_LAUNCH_ORDER_IMPLICIT"
rm -f train_gpt
SLURM_SUBMIT_DIR=$work sh examples/deploy/slurm.sbatch >log 2>&1 || fail "slurm.sbatch: $(cat log)"
grep -q '^srun .*\./train_gpt' log && [ -x train_gpt ] || fail "slurm.sbatch starts $(cat log)"
grep -q '^order=1$' log || fail "slurm.sbatch does not set NCCL_LAUNCH_ORDER_IMPLICIT"

# --- Kubernetes: the variables are those that ddp.h reads, the address is that of pod 0 ---

for file in kubernetes.yaml kubernetes_train.yaml; do
    grep -q 'NCCL_LAUNCH_ORDER_IMPLICIT, value: "1"' examples/deploy/$file || fail "$file does not set NCCL_LAUNCH_ORDER_IMPLICIT"
done

for name in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT; do
    grep -q "\"$name\"" ddp.h && grep -q "$name" examples/deploy/kubernetes.yaml || fail "$name is not in ddp.h or not in kubernetes.yaml"
done
python3 - <<'PYTHON' || fail "kubernetes.yaml or kubernetes_train.yaml is not what Kubernetes reads"
import sys
try:
    import yaml
except ImportError:
    sys.exit(print("PyYAML is missing: the files for Kubernetes were not parsed"))
service, job = yaml.safe_load_all(open("examples/deploy/kubernetes.yaml"))
spec, pod = job["spec"], job["spec"]["template"]["spec"]
value = {v["name"]: v["value"] for v in pod["containers"][0]["env"]}
assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == int(value["WORLD_SIZE"])
assert value["MASTER_ADDR"] == "%s-0.%s" % (job["metadata"]["name"], pod["subdomain"]) and pod["subdomain"] == service["metadata"]["name"]
assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} and service["spec"]["clusterIP"] == "None"

# The trainer: flags that it has, one GPU per rank, and text and checkpoints in the volume.
import re
claim, job = yaml.safe_load_all(open("examples/deploy/kubernetes_train.yaml"))
spec, pod = job["spec"], job["spec"]["template"]["spec"]
trainer = pod["containers"][0]
source = open("examples/gpt/train_gpt_cuda.cu").read() + open("examples/gpt/train.h").read()
flags = dict(re.findall("^(--[a-z-]+)=(.+)$", "\n".join(trainer["command"][1:-1]), re.M))
assert len(flags) == len(trainer["command"]) - 2, "an argument is no flag with a value"
assert all('{"%s", FLAG_' % name in source for name in flags), "a flag is not one of train_gpt_cuda"
assert flags["--resume"] == "auto" and int(flags["--restarts"]) > 0 and spec["backoffLimit"] > 0
assert len(flags["--gpus"].split(",")) == trainer["resources"]["limits"]["nvidia.com/gpu"] > 1
volumes = {v["name"]: v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["volumes"]}
kept = [m["mountPath"] for m in trainer["volumeMounts"] if volumes[m["name"]] == claim["metadata"]["name"]]
assert kept == [trainer["workingDir"]] and claim["kind"] == "PersistentVolumeClaim"
assert all(path.startswith(kept[0] + "/") for path in (flags["--checkpoint"], trainer["command"][-1]))
assert pod["restartPolicy"] == "Never" and spec["completions"] == spec["parallelism"] == 1
PYTHON
