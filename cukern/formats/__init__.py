"""The formats that twins and ops share: quantized numbers, prepared weights, rotated rows, a layer's numbers."""
