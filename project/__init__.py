"""Lockstep: ResNet-50 on ImageNet with Lightning's DDP, from one command and one YAML.

Commands, `python -m project.NAME`:
fit           train with Lightning
fit_raw       train with plain torch, from the same YAML
compare       both trainers, or any two commands, bit for bit
record        record what any training does, without a changed line
validate      exact evaluation of a checkpoint or of weights
predict       top-5 for image files and folders
export        weights for torchvision, safetensors, ONNX
prepare       smaller images, once, for faster training
trace         the timeline of a few steps, rank by rank
bench         throughput, overhead, scaling

Rooms, each of which imports those below it only (`lint-imports` holds that):
faults/       mistakes made on purpose, which the comparison must name
measure/      benchmarks and timelines
lit/          the Lightning trainer: module, data, callbacks, command line
raw/          the same by hand, one file per Lightning service
parity/       the comparison: two recorded runs in, findings and a report out
preflight/    before the first step: what cannot work is rejected, what will be trained is printed
report/       what a run says and draws of itself
record/       what a training did, exactly, as files: of our trainers, and of any command
ranks/        what coordinates the ranks of a training: start, end, save together
model/        network, optimizer, average, and the files that hold them
data/         from the files of a folder to batches of pixels
settings/     the YAML's settings, the command line, the arithmetic of batches
subprocesses/ other commands in clean processes, and folders for what they write
runtime/      this process and its machine: ends, files, devices
guard/        watches that ranks stay replicas: one file for anyone's script, nothing of ours
"""

__version__ = "0.1.0"
