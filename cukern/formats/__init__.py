"""The data formats that the references and the ops have in common, such as quantized weights and rotary layouts."""
