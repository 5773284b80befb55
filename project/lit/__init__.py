"""The Lightning trainer: a LightningModule, a LightningDataModule, callbacks, and the command line around them."""
