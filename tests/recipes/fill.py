import lightning.pytorch as pl
class Fill(pl.Callback):
    def __init__(self, folder, step, leave_bytes=0): self.folder, self.step, self.leave=folder,step,leave_bytes
    def on_train_batch_start(self, trainer, module, batch, i):
        if trainer.global_step==self.step:
            try:
                with open(self.folder+"/ballast","wb",buffering=0) as f:
                    while True: f.write(bytes(4096))
            except OSError as e: print("FILLED",e)
            if self.leave:
                import os; s=os.path.getsize(self.folder+"/ballast"); os.truncate(self.folder+"/ballast",max(0,s-self.leave))
