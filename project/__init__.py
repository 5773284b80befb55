"""Lockstep: ResNet-50 on ImageNet with Lightning's DDP, from one command and one YAML.

fit.py        train with Lightning
validate.py   exact evaluation of a checkpoint or of weights
predict.py    top-5 for image files and folders
export.py     weights for torchvision, ONNX
prepare.py    smaller images, once, for faster training
fit_raw.py    train with plain torch, from the same YAML
compare.py    train with both and compare them, bit for bit
trace.py      the timeline of a few steps, rank by rank
core/         model, data, transforms, recipe, files: plain torch; knows no process group and no Lightning
lit/          the Lightning trainer: module, data, callbacks, command line
raw/          the same by hand, one file per Lightning service
guard/        watches that the ranks stay replicas: one file for anyone's script, nothing of ours
parity/       the comparison: recorded runs in, findings and a report out
measure/      timelines of steps
"""
