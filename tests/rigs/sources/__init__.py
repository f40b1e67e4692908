"""The source tree: what checks of its folders, files, names and words share."""
