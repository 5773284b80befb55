"""What both trainers share: model, data, recipe, files. Plain torch; knows no process group and no Lightning."""
