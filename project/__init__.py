"""Lockstep: ResNet-50 on ImageNet with Lightning's DDP, the same in plain torch, and a proof that both do the same."""
