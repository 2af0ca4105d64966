"""Data formats that the references and the ops share."""
